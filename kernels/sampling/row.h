// One row of logits: widened to float32, changed as its sequence asks, scaled by its temperature.
#pragma once

#include <cmath>

#include "../common/native.h"

namespace batchinfer {

constexpr int64_t STEP = 4 * LANES;  // tokens that are scaled, pruned and drawn at once
constexpr float LOWEST = -std::numeric_limits<float>::infinity();

inline bool any_lane(IntVec mask) {
#if defined(__AVX512F__) && defined(__AVX512DQ__)
    return _mm512_movepi32_mask((__m512i)mask) != 0;
#else
    int32_t any = 0;
    for (int j = 0; j < LANES; j++) any |= mask[j];
    return any != 0;
#endif
}

// The tokens of each row: those of row r at offsets[r] to offsets[r + 1]. Null offsets: no row has any.
struct RowTokens {
    const int64_t *offsets, *token_ids;

    template <class F>
    void each(int64_t row, const F& f) const {
        if (offsets)
            for (int64_t i = offsets[row]; i < offsets[row + 1]; i++) f(token_ids[i], i);
    }

    bool has(int64_t row) const { return offsets && offsets[row] < offsets[row + 1]; }
};

// As LogitChanges in changes.py.
struct Changes {
    RowTokens biased;
    const float* bias;
    RowTokens penalised;
    const float *output_counts, *repetition, *presence, *frequency;
    RowTokens barred;

    bool has(int64_t row) const { return biased.has(row) || penalised.has(row) || barred.has(row); }

    void apply(int64_t row, float* logits) const {
        constexpr float LARGEST = 1e30f;
        auto bounded = [](float x) { return x > LARGEST ? LARGEST : (x < -LARGEST ? -LARGEST : x); };
        biased.each(row, [&](int64_t token, int64_t i) { logits[token] = bounded(logits[token] + bias[i]); });
        penalised.each(row, [&](int64_t token, int64_t i) {
            float value = logits[token], factor = std::min(std::max(repetition[row], 1 / LARGEST), LARGEST);
            value = value > 0 ? value / factor : value * factor;
            value -= frequency[row] * output_counts[i] + (output_counts[i] > 0 ? presence[row] : 0.0f);
            logits[token] = bounded(value);
        });
        barred.each(row, [&](int64_t token, int64_t) { logits[token] = LOWEST; });
    }
};

// The highest of n floats, a multiple of LANES; NaN where there is one.
inline float highest_of(const float* values, int64_t n) {
    Vec best = splat(LOWEST);
    IntVec has_nan{};
    for (int64_t i = 0; i < n; i += LANES) {
        Vec v = load_vec(values + i);
        best = max_vec(v, best);
        has_nan |= v != v;
    }
    for (int j = 0; j < LANES; j++)
        if (has_nan[j]) return std::numeric_limits<float>::quiet_NaN();
    return max_lanes(best);
}

// Logits of one row in float32, filled up with -inf to whole steps.
class Row {
   public:
    // Whether the highest logit is finite and no logit is NaN.
    template <class Format>
    bool load(const typename Format::Storage* logits, int64_t n) {
        num_steps_ = (n + STEP - 1) / STEP;
        values_ = values_memory_.at_least(size_t(num_steps_ * STEP));
        load_row<Format>(logits, values_, n);
        std::fill(values_ + n, values_ + num_steps_ * STEP, LOWEST);
        return find_highest();
    }

    bool change(const Changes& changes, int64_t row) {
        changes.apply(row, values_);
        return find_highest();
    }

    int64_t first_highest() const { return std::find(values_, values_ + num_steps_ * STEP, highest_) - values_; }

    // values = (values - the highest) / temperature; and the highest of each step.
    void scale(float temperature) {
        tops_ = tops_memory_.at_least(size_t(num_steps_));
        for (int64_t s = 0; s < num_steps_; s++) {
            Vec top = splat(LOWEST);
            for (int64_t i = s * STEP; i < (s + 1) * STEP; i += LANES) {
                Vec scaled = (load_vec(values_ + i) - highest_) / temperature;
                store_vec(values_ + i, scaled);
                top = max_vec(scaled, top);
            }
            tops_[s] = max_lanes(top);
        }
    }

    const float* values() const { return values_; }
    int64_t size() const { return num_steps_ * STEP; }
    int64_t num_steps() const { return num_steps_; }
    float top(int64_t step) const { return tops_[step]; }

   private:
    bool find_highest() {
        highest_ = highest_of(values_, size());
        return std::isfinite(highest_);
    }

    AlignedBuffer<float> values_memory_, tops_memory_;
    float *values_ = nullptr, *tops_ = nullptr, highest_ = LOWEST;
    int64_t num_steps_ = 0;
};

}  // namespace batchinfer
