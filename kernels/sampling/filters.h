// Where min-p, top-k and top-p cut a row of scaled logits (the highest is 0), exactly and without sorting it.
#pragma once

#include <functional>
#include <utility>

#include "row.h"

namespace batchinfer {

// Stores the lanes of the vector whose mask is set side by side; LANES places may be written. Returns their number.
inline int64_t store_kept(IntVec mask, Vec v, float* to) {
#if defined(__AVX512F__) && defined(__AVX512DQ__)
    __mmask16 kept = _mm512_movepi32_mask((__m512i)mask);
    _mm512_storeu_ps(to, _mm512_maskz_compress_ps(kept, (__m512)v));
    return __builtin_popcount(kept);
#else
    int64_t count = 0;
    for (int j = 0; j < LANES; j++) {
        to[count] = v[j];
        count -= mask[j];
    }
    return count;
#endif
}

// Logits that a cut may fall on and their weights: 1 each, or their probabilities. Narrowed as by quickselect, but around
// the middle of the range of values, so that a tail goes at once.
class Candidates {
   public:
    // Those of at least `least`.
    void gather(const Row& row, float least) {
        values_ = values_memory_.at_least(size_t(row.size() + LANES));
        weights_ = nullptr;
        keep(row.values(), row.size(), [=](Vec v) { return v >= splat(least); });
    }

    // The same, weighed by e^value.
    void gather_weighed(const Row& row, float least) {
        gather(row, least);
        weights_ = weights_memory_.at_least(size_t(row.size() + LANES));
        for (int64_t i = 0; i <= count_; i += LANES) store_vec(weights_ + i, exp_vec(load_vec(values_ + i)));
    }

    double weight() const { return weight_from(LOWEST); }

    // The highest value from which on upwards all weigh `target` together; the lowest if all weigh less.
    float cut(double target) {
        double above = 0;
        while (count_ > SORTED && lowest_ < highest_) {
            float pivot = lowest_ + (highest_ - lowest_) * 0.5f;
            if (pivot <= lowest_) pivot = highest_;
            double weight = weight_from(pivot);
            if (above + weight >= target) {
                keep(values_, count_, [=](Vec v) { return v >= splat(pivot); });
            } else {
                above += weight;
                keep(values_, count_, [=](Vec v) { return v < splat(pivot); });
            }
        }
        return count_ > SORTED ? lowest_ : cut_of_few(above, target);
    }

   private:
    static constexpr int64_t SORTED = 32;

    // Moves what `wanted` picks of the values to the front, and so their weights. `from` may be values_ itself.
    template <class Wanted>
    void keep(const float* from, int64_t n, const Wanted& wanted) {
        int64_t count = 0;
        Vec lowest = splat(-LOWEST), highest = splat(LOWEST);
        for (int64_t i = 0; i < n; i += LANES) {
            Vec v = load_vec(from + i);
            IntVec mask = wanted(v) & (v > splat(LOWEST));
            lowest = (mask != 0) & (v < lowest) ? v : lowest;
            highest = (mask != 0) & (v > highest) ? v : highest;
            if (weights_) store_kept(mask, load_vec(weights_ + i), weights_ + count);
            count += store_kept(mask, v, values_ + count);
        }
        count_ = count;
        store_vec(values_ + count, splat(LOWEST));
        if (weights_) store_vec(weights_ + count, Vec{});
        lowest_ = -max_lanes(-lowest), highest_ = max_lanes(highest);
    }

    // Summed in float32 a little at a time.
    double weight_from(float least) const {
        constexpr int64_t BLOCK = 16 * LANES;
        double sum = 0;
        for (int64_t i = 0; i < count_; i += BLOCK) {
            Vec part{};
            for (int64_t j = i; j < std::min(count_, i + BLOCK); j += LANES) {
                Vec v = load_vec(values_ + j);
                IntVec mask = (v >= splat(least)) & (v > splat(LOWEST));
                part += mask ? (weights_ ? load_vec(weights_ + j) : splat(1.0f)) : Vec{};
            }
            sum += double(sum_lanes(part));
        }
        return sum;
    }

    float cut_of_few(double above, double target) const {
        std::pair<float, float> sorted[SORTED];
        for (int64_t i = 0; i < count_; i++) sorted[i] = {values_[i], weights_ ? weights_[i] : 1.0f};
        std::sort(sorted, sorted + count_, [](auto a, auto b) { return a.first > b.first; });
        for (int64_t i = 0; i < count_; i++)
            if ((above += double(sorted[i].second)) >= target) return sorted[i].first;
        return sorted[count_ - 1].first;
    }

    AlignedBuffer<float> values_memory_, weights_memory_;
    float *values_ = nullptr, *weights_ = nullptr, lowest_ = 0, highest_ = 0;
    int64_t count_ = 0;
};

// The sum of e^value of the values from `low` up to, and without, `high`.
inline double mass_between(const Row& row, float low, float high) {
    double sum = 0;
    for (int64_t i = 0; i < row.size(); i += STEP) {
        if (row.top(i / STEP) < low) continue;
        Vec part{};
        for (int64_t j = i; j < i + STEP; j += LANES) {
            Vec v = load_vec(row.values() + j);
            IntVec mask = (v >= splat(low)) & (v < splat(high));
            if (any_lane(mask)) part += mask ? exp_vec(v) : Vec{};
        }
        sum += double(sum_lanes(part));
    }
    return sum;
}

// Filters of one row, applied by the rules of `scale_and_filter` in reference.py.
class Filters {
   public:
    // The lowest scaled logit that is kept. Logits below -87, whose probability is 0 in float32, may be kept or not.
    float cut(const Row& row, int64_t n, float min_p, int64_t top_k, float top_p) {
        float cut = min_p > 0 ? std::log(std::min(min_p, 1.0f)) : LOWEST;
        if (top_k > 0 && top_k < n) cut = std::max(cut, top_k_cut(row, std::max(cut, WEIGHTLESS), top_k));
        if (top_p < 1) cut = std::max(cut, top_p_cut(row, std::max(cut, WEIGHTLESS), n, top_p));
        return cut;
    }

   private:
    static constexpr float WEIGHTLESS = -87.0f;

    // -inf where there are fewer than top_k of at least `least`.
    float top_k_cut(const Row& row, float least, int64_t top_k) {
        candidates_.gather(row, std::max(least, kth_top(row, top_k)));
        return candidates_.weight() >= double(top_k) ? candidates_.cut(double(top_k)) : LOWEST;
    }

    // As many steps have a top of at least this, so that many logits do.
    float kth_top(const Row& row, int64_t k) {
        if (k > row.num_steps()) return LOWEST;
        float* tops = tops_memory_.at_least(size_t(row.num_steps()));
        for (int64_t s = 0; s < row.num_steps(); s++) tops[s] = row.top(s);
        std::nth_element(tops, tops + k - 1, tops + row.num_steps(), std::greater<float>());
        return tops[k - 1];
    }

    // Logits below ln((1 - top_p) / n) weigh less than 1 - top_p together, and all weigh at least 1: the cut is above.
    float top_p_cut(const Row& row, float least, int64_t n, float top_p) {
        constexpr float SLACK = 1e-2f;
        float bound = std::max(least, std::log((1 - top_p) / float(n)) - SLACK);
        candidates_.gather_weighed(row, bound);
        return candidates_.cut(double(top_p) * (candidates_.weight() + mass_between(row, least, bound)));
    }

    Candidates candidates_;
    AlignedBuffer<float> tops_memory_;
};

}  // namespace batchinfer
