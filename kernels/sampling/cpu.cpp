// Native greedy choice of tokens: each row is read once, in the format that it is in.

#include <cmath>

#include "../common/native.h"

namespace batchinfer {
namespace {

constexpr int64_t BLOCK = 1024;  // logits that are widened at once
constexpr float LOWEST = -std::numeric_limits<float>::infinity();

// The highest of BLOCK floats; NaN where there is one.
float highest_of(const float* values) {
    Vec best = splat(LOWEST);
    IntVec has_nan{};
    for (int64_t i = 0; i < BLOCK; i += LANES) {
        Vec v = load_vec(values + i);
        best = max_vec(v, best);
        has_nan |= v != v;
    }
    for (int j = 0; j < LANES; j++)
        if (has_nan[j]) return std::numeric_limits<float>::quiet_NaN();
    return max_lanes(best);
}

// The first token with the highest logit. Returns whether that is finite and no logit is NaN.
template <class Format>
bool choose(const typename Format::Storage* logits, int64_t n, int64_t* token_id) {
    alignas(64) float values[BLOCK];
    float best = LOWEST;
    int64_t best_block = 0;
    for (int64_t i = 0; i < n; i += BLOCK) {
        int64_t count = std::min(BLOCK, n - i);
        load_row<Format>(logits + i, values, count);
        std::fill(values + count, values + BLOCK, LOWEST);
        float highest = highest_of(values);
        if (highest != highest) return false;
        if (highest > best) best = highest, best_block = i;
    }
    int64_t place = best_block;
    while (place + 1 < n && Format::load(logits[place]) != best) place++;
    *token_id = place;
    return std::isfinite(best);
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
