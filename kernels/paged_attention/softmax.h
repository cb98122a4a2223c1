// The running softmax of attention. Scores are kept in powers of two, so that a weight is one short polynomial.
#pragma once

#include "attention.h"

namespace batchinfer {

constexpr float LOWEST = std::numeric_limits<float>::lowest();

// 2^x to 1e-7 of its value for x <= 0; exactly 1 at 0; 0 below -126; NaN for NaN.
// x = n + r, then the Taylor series of 2^r, whose next term is below 2^-27.
inline Vec exp2_vec(Vec x) {
    constexpr float ROUND = 12582912.0f, LN2 = 0.693147181f;
    Vec low = splat(-126.0f), zero{};
    Vec clamped = x < low ? low : x;
    Vec shifted = clamped + ROUND;
    Vec r = (clamped - (shifted - ROUND)) * LN2;
    Vec p = r * (1.0f / 5040) + (1.0f / 720);
    p = p * r + (1.0f / 120);
    p = p * r + (1.0f / 24);
    p = p * r + (1.0f / 6);
    p = p * r + 0.5f;
    p = p * r + 1.0f;
    p = p * r + 1.0f;
    Vec power = (Vec)((IntVec)p + ((IntVec)shifted << 23));
    power = x == x ? power : x;
    return x < low ? zero : power;
}

inline float exp2_of(float x) { return exp2_vec(splat(x))[0]; }

// A softmax under way: per row the highest score, LANES partial sums of weights, and the weighted sum of values.
struct Softmax {
    float* best;      // [rows]
    float* total;     // [rows, LANES]
    float* weighted;  // [rows, padded head_dim]

    static int64_t size(int64_t rows, int64_t width) { return rows * (width + LANES + 1); }

    static Softmax at(float* memory, int64_t rows, int64_t width) {
        return {memory + rows * (width + LANES), memory + rows * width, memory};  // weighted first: it is aligned
    }

    void clear(int64_t rows, int64_t width) const {
        std::fill_n(weighted, rows * (width + LANES), 0.0f);
        std::fill_n(best, rows, LOWEST);
    }

    // Takes in the softmax over later keys. Into a cleared one that is a copy.
    void merge(const Softmax& later, int64_t rows, int64_t width) const {
        for (int64_t r = 0; r < rows; r++) {
            float highest = later.best[r] > best[r] ? later.best[r] : best[r];
            float keep = exp2_of(best[r] - highest), add = exp2_of(later.best[r] - highest);
            best[r] = highest;
            blend(total + r * LANES, later.total + r * LANES, LANES, keep, add);
            blend(weighted + r * width, later.weighted + r * width, width, keep, add);
        }
    }

    // Copies rows [first, first + n) to a softmax of n rows.
    void copy_rows(int64_t first, int64_t n, int64_t width, const Softmax& to) const {
        std::copy_n(best + first, n, to.best);
        std::copy_n(total + first * LANES, n * LANES, to.total);
        std::copy_n(weighted + first * width, n * width, to.weighted);
    }

    // What the weighted sum of row r takes to become the attention's result: `factor` over the sum of weights, with a
    // sink's score among them where there is one.
    struct Ratio {
        float factor, divisor;
    };
    Ratio ratio(int64_t r, float factor, const float* sink) const {
        float sum = sum_lanes(load_vec(total + r * LANES));
        if (!sink) return {factor, sum};
        float score = *sink * LOG2_E, highest = score > best[r] ? score : best[r];
        float keep = exp2_of(best[r] - highest);
        return {factor * keep, sum * keep + exp2_of(score - highest)};
    }

   private:
    static void blend(float* to, const float* from, int64_t n, float keep, float add) {
        for (int64_t i = 0; i < n; i++) to[i] = to[i] * keep + from[i] * add;
    }
};

// What turns a chunk's products of queries and keys into weights of values.
struct Factors {
    alignas(64) float key[CHUNK], value[CHUNK];
    float base;  // of scores, without a token's scale
    float cap;   // the soft cap in powers of two, and key holds factors to cap's unit; 0: none

    void set_scales(const Problem& p, int64_t kv_head) {
        float factor = float(p.scale) * p.static_key_scale(kv_head);
        cap = float(p.soft_cap) * LOG2_E;
        base = p.soft_cap > 0 ? factor / float(p.soft_cap) : factor * LOG2_E;
        std::fill_n(key, CHUNK, base), std::fill_n(value, CHUNK, 1.0f);
    }

    void load_group(int g, const float* key_scales, const float* value_scales, int count) {
        for (int j = 0; j < GROUP; j++) {
            key[g * GROUP + j] = key_scales[j] * base;
            value[g * GROUP + j] = j < count ? value_scales[j] : 0.0f;  // beyond it there may be NaN
        }
    }
};

// The keys of a chunk that a query sees.
struct Sight {
    int first, last;
};

// Scores of one row, [16 * GROUPS], to weights, `bias` added to each; the row's softmax moves on. Returns the decay of
// what came before.
template <class Math, int GROUPS, bool CAPPED>
float weigh(const float* scores, const Factors& f, Sight sight, float bias, float& best, float* total,
            typename Math::Element* weights) {
    constexpr int N = GROUPS * GROUP / LANES;
    constexpr float HIDDEN = -std::numeric_limits<float>::infinity();
    Vec t[N], most = splat(best);
    for (int i = 0; i < N; i++) {
        t[i] = load_vec(scores + i * LANES) * load_vec(f.key + i * LANES) + bias;
        if (CAPPED) t[i] = (1.0f - 2.0f / (exp_vec(t[i] * 2.0f) + 1.0f)) * f.cap;  // tanh
    }
    if (sight.first > 0 || sight.last < GROUPS * GROUP - 1) {
        IntVec place;
        for (int j = 0; j < LANES; j++) place[j] = j;
        for (int i = 0; i < N; i++, place += LANES)
            t[i] = (place < sight.first) | (place > sight.last) ? splat(HIDDEN) : t[i];
    }
    for (int i = 0; i < N; i++) most = max_vec(t[i], most);
    float highest = max_lanes(most);
    Vec decay = Math::exp2(splat(best - highest));
    Vec sum = load_vec(total) * decay;
    for (int i = 0; i < N; i++) {
        Vec weight = Math::exp2(t[i] - highest);
        sum += weight;
        Math::store_weights(weight * load_vec(f.value + i * LANES), weights + i * (LANES / Math::PER_ELEMENT));
    }
    store_vec(total, sum);
    best = highest;
    return decay[0];
}

template <class Math, bool CAPPED>
float weigh_groups(int groups, const float* scores, const Factors& f, Sight sight, float bias, float& best,
                   float* total, typename Math::Element* weights) {
    static_assert(CHUNK / GROUP == 4, "one case a number of groups");
    switch (groups) {
        case 1: return weigh<Math, 1, CAPPED>(scores, f, sight, bias, best, total, weights);
        case 2: return weigh<Math, 2, CAPPED>(scores, f, sight, bias, best, total, weights);
        case 3: return weigh<Math, 3, CAPPED>(scores, f, sight, bias, best, total, weights);
        default: return weigh<Math, 4, CAPPED>(scores, f, sight, bias, best, total, weights);
    }
}

}  // namespace batchinfer
