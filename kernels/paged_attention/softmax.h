// The running softmax of attention. Scores are kept in powers of two, so that a weight is one short polynomial.
#pragma once

#include "attention.h"

namespace batchinfer {

constexpr float LOWEST = std::numeric_limits<float>::lowest();
constexpr float HIDDEN = -std::numeric_limits<float>::infinity();

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
    float base;       // of scores, without a token's scale
    float cap;        // the soft cap in powers of two, and key holds factors to cap's unit; 0: none
    bool has_values;  // whether those in `value` count

    void set_scales(const Problem& p, int64_t kv_head) {
        float factor = float(p.scale) * p.static_key_scale(kv_head);
        cap = float(p.soft_cap) * LOG2_E;
        base = p.soft_cap > 0 ? factor / float(p.soft_cap) : factor * LOG2_E;
        has_values = p.scales_per_token;
        std::fill_n(key, CHUNK, base), std::fill_n(value, CHUNK, 1.0f);
    }

    void load_group(int g, const float* key_scales, const float* value_scales, int count) {
        for (int j = 0; j < GROUP; j++) {
            key[g * GROUP + j] = key_scales[j] * base;
            value[g * GROUP + j] = j < count ? value_scales[j] : 0.0f;  // beyond it there may be NaN
        }
    }

    // Whether `base` is all that scores lack: it is left to what reads them, and the highest remains the highest.
    bool is_one() const { return !has_values && !(cap > 0) && base > 0; }

    // Of the n scores of a row.
    void apply(float* scores, int n) const {
        for (int k = 0; k < n; k += LANES) {
            Vec t = load_vec(scores + k) * load_vec(key + k);
            if (cap > 0) t = (1.0f - 2.0f / (exp_vec(t * 2.0f) + 1.0f)) * cap;  // tanh
            store_vec(scores + k, t);
        }
    }
};

// The keys of a chunk that a query sees.
struct Sight {
    int first, last;

    // The others' scores, of n, get no weight.
    void hide_others(float* scores, int n) const {
        if (first <= 0 && last >= n - 1) return;
        IntVec place;
        for (int j = 0; j < LANES; j++) place[j] = j;
        for (int k = 0; k < n; k += LANES, place += LANES) {
            Vec t = load_vec(scores + k);
            store_vec(scores + k, (place < first) | (place > last) ? splat(HIDDEN) : t);
        }
    }
};

inline float highest_of(const float* scores, int n) {
    Vec most = splat(HIDDEN);
    for (int k = 0; k < n; k += LANES) most = max_vec(load_vec(scores + k), most);
    return max_lanes(most);
}

// The rows of one block of the products over one chunk: their scores, which become weights. `bias` is added to each score
// of a row; decay tells what remains of a row's sums over earlier keys.
template <class Math>
struct ScoreBlock {
    using Element = typename Math::Element;
    static constexpr int ROWS = Math::MAX_ROWS, PADDED = (ROWS + LANES - 1) / LANES * LANES;
    alignas(64) float scores[ROWS * CHUNK];
    alignas(64) Element weights[ROWS * CHUNK];
    alignas(64) float decay[PADDED];
    Sight sight[ROWS];
    float bias[ROWS];

    // Of the first `rows` rows and n keys. The rows' softmaxes move on.
    void weigh(int64_t rows, int n, const Factors& f, float* best, float* total) {
        alignas(64) float highest[PADDED];
        std::fill_n(highest, PADDED, LOWEST);
        std::copy_n(best, rows, highest);
        const float factor = f.is_one() ? f.base : 1.0f;
        raise(rows, n, f, factor, highest);
        std::copy_n(highest, rows, best);
        for (int64_t i = 0; i < rows; i++) {
            auto weigh_row = f.has_values ? &ScoreBlock::weigh_row<true> : &ScoreBlock::weigh_row<false>;
            (this->*weigh_row)(i, n, f, factor, bias[i] - highest[i], total + i * LANES);
        }
    }

   private:
    // The highest score of each row, and what that makes of the earlier sums: one vector of all rows.
    void raise(int64_t rows, int n, const Factors& f, float factor, float* highest) {
        alignas(64) float most[PADDED];
        std::fill_n(most, PADDED, LOWEST);
        for (int64_t i = 0; i < rows; i++) {
            float* own = scores + i * CHUNK;
            if (!f.is_one()) f.apply(own, n);
            sight[i].hide_others(own, n);
            most[i] = highest_of(own, n) * factor + bias[i];
        }
        for (int i = 0; i < PADDED; i += LANES) {
            Vec before = load_vec(highest + i), now = max_vec(load_vec(most + i), before);
            store_vec(highest + i, now);
            store_vec(decay + i, Math::exp2(before - now));
        }
    }

    template <bool HAS_VALUES>
    void weigh_row(int64_t i, int n, const Factors& f, float factor, float offset, float* total) {
        const float* own = scores + i * CHUNK;
        Element* to = weights + i * (CHUNK / Math::PER_ELEMENT);
        Vec sum = load_vec(total) * decay[i];
        for (int k = 0; k < n; k += LANES) {
            Vec weight = Math::exp2(load_vec(own + k) * factor + offset);
            sum += weight;
            Math::store_weights(HAS_VALUES ? weight * load_vec(f.value + k) : weight, to + k / Math::PER_ELEMENT);
        }
        store_vec(total, sum);
    }
};

}  // namespace batchinfer
