// Native choice of tokens: greedy, and the draw. Rows are read in the format that they are in.

#include <cmath>

#include "draw.h"

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

// argmax of (logits - highest) / temperature + noise, as `choose`.
template <class Format>
bool draw_token(const typename Format::Storage* logits, int64_t n, float temperature, uint64_t key, uint32_t position,
                int64_t* token_id) {
    int64_t place = 0;
    if (!choose<Format>(logits, n, &place)) return false;
    constexpr int64_t STEP = 4 * LANES;
    float highest = Format::load(logits[place]);
    alignas(64) float values[STEP], noise[STEP];
    IntVec tokens;
    for (int j = 0; j < LANES; j++) tokens[j] = j;
    Best best;
    for (int64_t i = 0; i < n; i += STEP) {
        int64_t count = std::min(STEP, n - i);
        load_row<Format>(logits + i, values, count);
        std::fill(values + count, values + STEP, LOWEST);
        noise_of(i, key, position, noise);
        for (int64_t j = 0; j < STEP; j += LANES, tokens += LANES)
            best.take((load_vec(values + j) - highest) / temperature + load_vec(noise + j), tokens);
    }
    *token_id = best.first();
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

// As `greedy`; temperatures above 0, noise keys and positions: [rows].
extern "C" void draw(const void* logits, int64_t rows, int64_t n, int64_t stride, const float* temperatures,
                     const uint64_t* keys, const int64_t* positions, int64_t* token_ids, bool* is_finite,
                     int64_t format, int64_t threads) {
    using namespace batchinfer;
    with_float_format(format, [&](auto f) {
        using Format = decltype(f);
        parallel_rows(rows, n, threads, [&](int64_t first, int64_t last) {
            for (int64_t r = first; r < last; r++) {
                token_ids[r] = 0;
                is_finite[r] = draw_token<Format>(static_cast<const typename Format::Storage*>(logits) + r * stride, n,
                                                  temperatures[r], keys[r], uint32_t(positions[r]), token_ids + r);
            }
        });
    });
}
