// The draw: argmax of scaled logits plus Gumbel noise, which is made on the way from Philox4x32-10 words.
// Sources: as in noise.py, whose words these are, bit by bit; the noise is that of noise.py to a few units in the last
// place.
#pragma once

#include "row.h"

namespace batchinfer {

typedef uint32_t Words __attribute__((vector_size(4 * LANES)));

// The halves of the 64-bit products a * factor.
inline void multiply_words(Words a, uint32_t factor, Words& high, Words& low) {
#if defined(__AVX512F__)
    __m512i x = (__m512i)a, y = _mm512_set1_epi32(int(factor));
    __m512i even = _mm512_mul_epu32(x, y), odd = _mm512_mul_epu32(_mm512_srli_epi64(x, 32), y);
    high = (Words)_mm512_mask_blend_epi32(0xaaaa, _mm512_srli_epi64(even, 32), odd);
    low = (Words)_mm512_mullo_epi32(x, y);
#else
    for (int j = 0; j < LANES; j++) {
        uint64_t product = uint64_t(a[j]) * factor;
        high[j] = uint32_t(product >> 32), low[j] = uint32_t(product);
    }
#endif
}

// The four words of LANES counters (c[0], c[1], 0, 0), in place.
inline void philox(Words (&c)[4], uint32_t key0, uint32_t key1) {
    for (int round = 0; round < 10; round++) {
        Words high0, low0, high1, low1;
        multiply_words(c[0], 0xD2511F53u, high0, low0);
        multiply_words(c[2], 0xCD9E8D57u, high1, low1);
        c[0] = high1 ^ c[1] ^ key0, c[1] = low1;
        c[2] = high0 ^ c[3] ^ key1, c[3] = low0;
        key0 += 0x9E3779B9u, key1 += 0xBB67AE85u;
    }
}

// ln x of normal positive x, to 2e-7 of its value: x = m 2^e with m in [sqrt(1/2), sqrt(2)), and ln m = 2 artanh(s) with
// s = (m - 1) / (m + 1), whose series goes on with s^11 / 11 < 2^-30 s.
inline Vec log_vec(Vec x) {
    constexpr int32_t SQRT_HALF = 0x3f3504f3;
    constexpr float LN2_HIGH = 0.693359375f, LN2_LOW = -2.12194440e-4f;
    IntVec shifted = (IntVec)x - SQRT_HALF;
    IntVec exponent = shifted >> 23;
    Vec m = (Vec)((shifted & 0x7fffff) + SQRT_HALF), e = __builtin_convertvector(exponent, Vec);
    Vec s = (m - 1.0f) / (m + 1.0f), square = s * s;
    Vec p = square * (2.0f / 9) + (2.0f / 7);
    p = p * square + (2.0f / 5);
    p = p * square + (2.0f / 3);
    Vec small = p * square * s + e * LN2_LOW;
    return small + 2.0f * s + e * LN2_HIGH;
}

// -log(-log(1 - u)) with u in (0, 1) made of the word. 1 - u is rounded; what that loses is added to its logarithm.
inline Vec gumbel(Words words) {
    Vec u = (__builtin_convertvector(words, Vec) + 0.5f) * 2.3283064365386963e-10f;
    Vec most = splat(1.0f - 5.9604645e-8f);
    u = u < most ? u : most;
    Vec rest = 1.0f - u;
    Vec lost = u - (1.0f - rest);
    return -log_vec(lost - log_vec(rest));
}

// The highest of a row so far, by lane, of equal ones the first.
struct Best {
    Vec value = splat(LOWEST);
    IntVec token{};

    void take(Vec values, IntVec tokens) {
        IntVec is_higher = (values > value) | ((values == value) & (tokens < token));
        value = is_higher ? values : value;
        token = is_higher ? tokens : token;
    }

    int64_t first() const {
        int best = 0;
        for (int j = 1; j < LANES; j++)
            if (value[j] > value[best] || (value[j] == value[best] && token[j] < token[best])) best = j;
        return token[best];
    }
};

// Draws from the scaled logits of a row that are not below `cut`. Noise is made only where it can decide: it is at most
// 33 ln 2, and as it exceeds d only for words below 2^32 e^-d, most words need no logarithm.
class Draw {
   public:
    Draw(const Row& row, float cut, uint64_t key, uint32_t position)
        : row_(row), cut_(cut), key_(key), position_(position) {}

    // The row has a finite highest logit, and no NaN.
    int64_t token() {
        int64_t first = 0;
        while (row_.top(first) < 0) first++;  // the likeliest token sets a bound that drops most steps
        visit(first);
        for (int64_t step = 0; step < row_.num_steps(); step++)
            if (step != first) visit(step);
        return best_.first();
    }

   private:
    static constexpr float MOST_NOISE = 22.9f, SLACK = 1e-3f;  // far above the rounding of noise and sums

    void visit(int64_t step) {
        float top = row_.top(step), missing = bound_ - top;
        if (top < cut_ || missing > MOST_NOISE) return;
        Words words[4] = {{}, Words{} + position_, {}, {}};
        for (int j = 0; j < LANES; j++) words[0][j] = uint32_t(step * LANES + j);
        philox(words, uint32_t(key_), uint32_t(key_ >> 32));
        if (any_below(words, words_beyond(missing))) take(step, words);
    }

    // At least 2^32 e^-missing, as a power of two.
    static uint64_t words_beyond(float missing) {
        float halvings = (missing - SLACK) * 1.4426950f;  // -inf before anything was drawn
        return uint64_t(1) << 32 >> (halvings > 0 ? std::min(int(halvings), 32) : 0);
    }

    static bool any_below(const Words (&words)[4], uint64_t limit) {
        if (limit >> 32) return true;
        Words bound = Words{} + uint32_t(limit);
        return any_lane((words[0] < bound) | (words[1] < bound) | (words[2] < bound) | (words[3] < bound));
    }

    // Token t takes word t % 4 of counter t / 4.
    void take(int64_t step, const Words (&words)[4]) {
        alignas(64) uint32_t by_token[STEP];
        for (int j = 0; j < LANES; j++)
            for (int i = 0; i < 4; i++) by_token[4 * j + i] = words[i][j];
        IntVec tokens;
        for (int j = 0; j < LANES; j++) tokens[j] = int32_t(step * STEP + j);
        for (int64_t i = 0; i < STEP; i += LANES, tokens += LANES) {
            Words part;
            std::memcpy(&part, by_token + i, sizeof part);
            Vec scaled = load_vec(row_.values() + step * STEP + i);
            best_.take(scaled >= splat(cut_) ? scaled + gumbel(part) : splat(LOWEST), tokens);
        }
        bound_ = max_lanes(best_.value);
    }

    const Row& row_;
    float cut_, bound_ = LOWEST;
    uint64_t key_;
    uint32_t position_;
    Best best_;
};

}  // namespace batchinfer
