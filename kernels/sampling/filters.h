// Where min-p, top-k and top-p cut a row of scaled logits (the highest is 0), exactly and without sorting it.
#pragma once

#include <utility>

#include "row.h"

namespace batchinfer {

// Stores the lanes of the two vectors whose mask is set side by side; LANES more places than that may be written.
// Returns their number.
inline int64_t store_kept(IntVec mask, Vec a, Vec b, float* to_a, float* to_b) {
#if defined(__AVX512F__) && defined(__AVX512DQ__)
    __mmask16 kept = _mm512_movepi32_mask((__m512i)mask);
    _mm512_storeu_ps(to_a, _mm512_maskz_compress_ps(kept, (__m512)a));
    _mm512_storeu_ps(to_b, _mm512_maskz_compress_ps(kept, (__m512)b));
    return __builtin_popcount(kept);
#else
    int64_t count = 0;
    for (int j = 0; j < LANES; j++) {
        to_a[count] = a[j], to_b[count] = b[j];
        count -= mask[j];
    }
    return count;
#endif
}

// Logits that a cut may fall on and what each weighs. Narrowed as by quickselect, but around the middle of the range of
// values, so that what lies in the tail goes at once.
class Candidates {
   public:
    // Those of at least `least`; of the others none has any weight.
    template <class Weigh>
    void gather(const Row& row, float least, const Weigh& weigh) {
        values_ = values_memory_.at_least(size_t(row.size() + LANES));
        weights_ = weights_memory_.at_least(size_t(row.size() + LANES));
        keep(row.values(), row.size(), [=](Vec v) { return v >= splat(least); },
             [&](int64_t, Vec v) { return weigh(v); });
    }

    double weight() const { return weight_from(LOWEST); }

    // The highest value from which on upwards all weigh `target` together; the lowest if all weigh less.
    float cut(double target) {
        double above = 0;
        while (count_ > SORTED && lowest_ < highest_) {
            float pivot = lowest_ + (highest_ - lowest_) * 0.5f;
            if (pivot <= lowest_) pivot = highest_;
            double weight = weight_from(pivot);
            bool goes_up = above + weight >= target;
            if (!goes_up) above += weight;
            auto own_weight = [this](int64_t i, Vec) { return load_vec(weights_ + i); };
            if (goes_up) keep(values_, count_, [=](Vec v) { return v >= splat(pivot); }, own_weight);
            else keep(values_, count_, [=](Vec v) { return v < splat(pivot); }, own_weight);
        }
        return count_ > SORTED ? lowest_ : cut_of_few(above, target);
    }

   private:
    static constexpr int64_t SORTED = 32;

    // Moves what `wanted` picks of the values to the front. `from` may be values_ itself.
    template <class Wanted, class Weight>
    void keep(const float* from, int64_t n, const Wanted& wanted, const Weight& weight) {
        int64_t count = 0;
        Vec lowest = splat(-LOWEST), highest = splat(LOWEST);
        for (int64_t i = 0; i < n; i += LANES) {
            Vec v = load_vec(from + i);
            IntVec mask = wanted(v) & (v > splat(LOWEST));
            lowest = (mask != 0) & (v < lowest) ? v : lowest;
            highest = (mask != 0) & (v > highest) ? v : highest;
            count += store_kept(mask, v, weight(i, v), values_ + count, weights_ + count);
        }
        count_ = count;
        store_vec(values_ + count, splat(LOWEST));
        store_vec(weights_ + count, Vec{});
        lowest_ = -max_lanes(-lowest), highest_ = max_lanes(highest);
    }

    // Summed in float32 a little at a time.
    double weight_from(float least) const {
        constexpr int64_t BLOCK = 16 * LANES;
        double sum = 0;
        for (int64_t i = 0; i < count_; i += BLOCK) {
            Vec part{};
            for (int64_t j = i; j < std::min(count_, i + BLOCK); j += LANES)
                part += load_vec(values_ + j) >= splat(least) ? load_vec(weights_ + j) : Vec{};
            sum += double(sum_lanes(part));
        }
        return sum;
    }

    float cut_of_few(double above, double target) const {
        std::pair<float, float> sorted[SORTED];
        for (int64_t i = 0; i < count_; i++) sorted[i] = {values_[i], weights_[i]};
        std::sort(sorted, sorted + count_, [](auto a, auto b) { return a.first > b.first; });
        for (int64_t i = 0; i < count_; i++)
            if ((above += double(sorted[i].second)) >= target) return sorted[i].first;
        return sorted[count_ - 1].first;
    }

    AlignedBuffer<float> values_memory_, weights_memory_;
    float *values_ = nullptr, *weights_ = nullptr, lowest_ = 0, highest_ = 0;
    int64_t count_ = 0;
};

// The lowest scaled logit that the filters keep, by the rules of `scale_and_filter` in reference.py. Logits below -87,
// whose probability is 0 in float32, may be kept or not.
inline float filter_cut(const Row& row, int64_t n, float min_p, int64_t top_k, float top_p, Candidates& candidates) {
    constexpr float WEIGHTLESS = -87.0f;
    float cut = min_p > 0 ? std::log(std::min(min_p, 1.0f)) : LOWEST;
    if (top_k > 0 && top_k < n) {
        candidates.gather(row, std::max(cut, WEIGHTLESS), [](Vec) { return splat(1.0f); });
        if (candidates.weight() >= double(top_k)) cut = candidates.cut(double(top_k));
    }
    if (top_p < 1) {
        candidates.gather(row, std::max(cut, WEIGHTLESS), [](Vec v) { return exp_vec(v); });
        cut = std::max(cut, candidates.cut(double(top_p) * candidates.weight()));
    }
    return cut;
}

}  // namespace batchinfer
