// Native choice of tokens: greedy, and with changes, filters and the draw. Rows are read in the format that they are in.

#include "draw.h"
#include "filters.h"
#include "row.h"

namespace batchinfer {
namespace {

// As Arguments in cpu.py: rows of n logits, `stride` elements apart, and what each row asks for; temperature 0 is greedy.
struct Arguments {
    const void* logits;
    int64_t rows, n, stride, format, threads;
    const float *temperature, *min_p;
    const int64_t* top_k;
    const float* top_p;
    const uint64_t* noise_keys;
    const int64_t* positions;
    Changes changes;
    int64_t* token_ids;
    bool* is_finite;
};

// The first token with the highest logit. Returns whether that is finite and no logit is NaN.
template <class Format>
bool choose(const typename Format::Storage* logits, int64_t n, int64_t* token_id) {
    constexpr int64_t BLOCK = 1024;  // logits that are widened at once
    alignas(64) float values[BLOCK];
    float best = LOWEST;
    int64_t best_block = 0;
    for (int64_t i = 0; i < n; i += BLOCK) {
        int64_t count = std::min(BLOCK, n - i);
        load_row<Format>(logits + i, values, count);
        std::fill(values + count, values + BLOCK, LOWEST);
        float highest = highest_of(values, BLOCK);
        if (highest != highest) return false;
        if (highest > best) best = highest, best_block = i;
    }
    int64_t place = best_block;
    while (place + 1 < n && Format::load(logits[place]) != best) place++;
    *token_id = place;
    return std::isfinite(best);
}

// The same of the logits that the row's parameters make; they must be finite before the changes, too.
template <class Format>
bool sample_row(const Arguments& a, int64_t r, int64_t* token_id) {
    auto logits = static_cast<const typename Format::Storage*>(a.logits) + r * a.stride;
    bool is_changed = a.changes.has(r);
    if (a.temperature[r] == 0 && !is_changed) return choose<Format>(logits, a.n, token_id);
    thread_local Row row;
    thread_local Filters filters;
    if (!row.load<Format>(logits, a.n)) return false;
    if (is_changed && !row.change(a.changes, r)) return false;
    if (a.temperature[r] == 0) {
        *token_id = row.first_highest();
        return true;
    }
    row.scale(a.temperature[r]);
    float cut = filters.cut(row, a.n, a.min_p[r], a.top_k[r], a.top_p[r]);
    *token_id = Draw(row, cut, a.noise_keys[r], uint32_t(a.positions[r])).token();
    return true;
}

}  // namespace
}  // namespace batchinfer

// logits: [rows, n], rows `stride` elements apart; token_ids, is_finite: [rows].
extern "C" void greedy(const void* logits, int64_t rows, int64_t n, int64_t stride, int64_t* token_ids, bool* is_finite,
                       int64_t format, int64_t threads) {
    using namespace batchinfer;
    with_float_format(format, [&](auto f) {
        using Format = decltype(f);
        parallel_rows(rows, n, threads, [&](int64_t first, int64_t last) {
            for (int64_t r = first; r < last; r++) {
                token_ids[r] = 0;
                is_finite[r] = choose<Format>(static_cast<const typename Format::Storage*>(logits) + r * stride, n,
                                              token_ids + r);
            }
        });
    });
}

extern "C" void sample(const batchinfer::Arguments* arguments) {
    using namespace batchinfer;
    const Arguments& a = *arguments;
    with_float_format(a.format, [&](auto f) {
        parallel_items(a.rows, a.threads, 1, [&](int64_t r) {
            a.token_ids[r] = 0;
            a.is_finite[r] = sample_row<decltype(f)>(a, r, a.token_ids + r);
        });
    });
}
