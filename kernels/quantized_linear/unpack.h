// What packed_linear's weights look like in memory, and how a block of them becomes numbers.
#pragma once

#include "outputs.h"

namespace batchinfer {

enum Kind : int64_t { KIND_INT4, KIND_UINT8, KIND_E4M3, KIND_BF16 };  // as in packed.py

constexpr int STEP = 4;  // inputs that are unpacked at once

// As PackedWeight in packed.py.
struct Packed {
    const uint8_t* values;   // [blocks, steps, bytes of a step]
    const void* parameters;  // fp16 or fp32 [blocks, groups, 2, PANEL], or null
    const int32_t* inputs;   // [STEP * steps] or null
    const float* bias;       // [num_outputs] or null
    int64_t kind, has_fp32_parameters, has_offsets;
    int64_t steps, group_steps, num_outputs, num_inputs, is_paired;

    int64_t groups() const { return (steps + group_steps - 1) / group_steps; }
    int64_t blocks() const { return (num_outputs + PANEL - 1) / PANEL; }
    int64_t step_bytes() const { return STEP * PANEL / 2 * (kind == KIND_INT4 ? 1 : kind == KIND_BF16 ? 4 : 2); }
    const uint8_t* block_values(int64_t block) const { return values + block * steps * step_bytes(); }
};

// Scales and zeros or offsets of one group of a block.
struct Parameters {
    alignas(64) float scales[PANEL], shifts[PANEL];

    void load(const Packed& w, int64_t block, int64_t group) {
        const int64_t first = (block * w.groups() + group) * 2 * PANEL;
        if (w.has_fp32_parameters) {
            auto from = static_cast<const float*>(w.parameters) + first;
            std::memcpy(scales, from, sizeof scales);
            std::memcpy(shifts, from + PANEL, sizeof shifts);
        } else {
            auto from = static_cast<const uint16_t*>(w.parameters) + first;
            load_row<Fp16>(from, scales, PANEL);
            load_row<Fp16>(from + PANEL, shifts, PANEL);
        }
    }
};

// ---- any machine, any format of activations

// Stored number of input k of a step and output c of a block.
template <Kind KIND>
inline float stored_number(const uint8_t* step, int k, int c) {
    if (KIND == KIND_INT4) {
        const uint8_t byte = step[8 * (c % 8) + 4 * (k % 2) + 2 * (k / 2) + c / 16];
        return float(c / 8 % 2 ? byte >> 4 : byte & 15);
    }
    const int place = k / 2 * 2 * PANEL + 2 * c + k % 2;
    if (KIND == KIND_BF16) return Bf16::load(uint16_t(step[2 * place] | step[2 * place + 1] << 8));
    return KIND == KIND_E4M3 ? E4m3::load(step[place]) : float(step[place]);
}

// A block's numbers, rounded to Format, as [STEP * steps, PANEL].
template <Kind KIND, class Format>
void unpack_floats(const Packed& w, int64_t block, float* to) {
    Parameters p;
    const uint8_t* step = w.block_values(block);
    for (int64_t s = 0; s < w.steps; s++, step += w.step_bytes()) {
        if (KIND != KIND_BF16 && s % w.group_steps == 0) p.load(w, block, s / w.group_steps);
        for (int k = 0; k < STEP; k++, to += PANEL) {
            for (int c = 0; c < PANEL; c++) to[c] = stored_number<KIND>(step, k, c);
            if (KIND == KIND_BF16) {
            } else if (w.has_offsets) {
                for (int c = 0; c < PANEL; c++) to[c] *= p.scales[c];
                __asm__ volatile("" ::: "memory");  // or the compiler fuses product and sum, which rounds once
                for (int c = 0; c < PANEL; c++) to[c] += p.shifts[c];
            } else {
                for (int c = 0; c < PANEL; c++) to[c] = (to[c] - p.shifts[c]) * p.scales[c];
            }
            for (int c = 0; c < PANEL; c++) to[c] = Format::load(Format::store(to[c]));
        }
    }
}

template <class Format>
void unpack_floats(const Packed& w, int64_t block, float* to) {
    switch (w.kind) {
        case KIND_INT4: return unpack_floats<KIND_INT4, Format>(w, block, to);
        case KIND_UINT8: return unpack_floats<KIND_UINT8, Format>(w, block, to);
        case KIND_E4M3: return unpack_floats<KIND_E4M3, Format>(w, block, to);
        default: return unpack_floats<KIND_BF16, Format>(w, block, to);
    }
}

// ---- bf16 by AVX-512

#if defined(BATCHINFER_BF16)

// The lanes of these vectors are 8 outputs by 2 inputs, an octet of a block; two octets make a vector of bf16 pairs.
template <Kind KIND>
struct StepReader {
    const uint8_t* step;

    __m512 number(int q, int octet) const {
        __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(step + (q * 4 + octet) * 16));
        if (KIND == KIND_UINT8) return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(bytes));
        // The bits of a half, but for a factor of 2^8: sign, 4 bits of exponent, 3 of mantissa.
        __m256i wide = _mm256_slli_epi16(_mm256_cvtepi8_epi16(bytes), 7);
        return _mm512_cvtph_ps(_mm256_and_si256(wide, _mm256_set1_epi16(short(0xbfff))));
    }
};

template <>
struct StepReader<KIND_INT4> {
    const uint8_t* step;

    __m512 number(int q, int octet) const {
        const __m512 table = _mm512_set_ps(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
        __m512i words = _mm512_loadu_si512(step);
        return _mm512_permutexvar_ps(_mm512_srli_epi32(words, 16 * q + 4 * octet), table);  // takes 4 bits of an index
    }
};

// Scales and shifts of a group, each twice, by octets.
template <Kind KIND>
struct OctetParameters {
    __m512 scales[4], shifts[4];

    void load(const Packed& w, int64_t block, int64_t group) {
        const int64_t first = (block * w.groups() + group) * 2 * PANEL;
        for (int half = 0; half < 2; half++) {
            __m512 scale = parameters(w, first + 16 * half), shift = parameters(w, first + PANEL + 16 * half);
            if (KIND == KIND_E4M3) scale = _mm512_mul_ps(scale, _mm512_set1_ps(256.0f));
            const __m512i low = _mm512_set_epi32(7, 7, 6, 6, 5, 5, 4, 4, 3, 3, 2, 2, 1, 1, 0, 0);
            const __m512i high = _mm512_add_epi32(low, _mm512_set1_epi32(8));
            scales[2 * half] = _mm512_permutexvar_ps(low, scale);
            scales[2 * half + 1] = _mm512_permutexvar_ps(high, scale);
            shifts[2 * half] = _mm512_permutexvar_ps(low, shift);
            shifts[2 * half + 1] = _mm512_permutexvar_ps(high, shift);
        }
    }

    static __m512 parameters(const Packed& w, int64_t first) {
        if (w.has_fp32_parameters) return _mm512_loadu_ps(static_cast<const float*>(w.parameters) + first);
        auto from = static_cast<const uint16_t*>(w.parameters) + first;
        return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
    }
};

// The number that a stored one stands for. Rounds twice, as compilers do not fuse operations of a given rounding.
template <Kind KIND, bool HAS_OFFSETS>
inline __m512 scaled(__m512 number, __m512 scale, __m512 shift) {
    constexpr int NEAREST = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
    if (KIND == KIND_E4M3) return _mm512_mul_ps(number, scale);
    if (HAS_OFFSETS) return _mm512_add_ps(_mm512_mul_round_ps(number, scale, NEAREST), shift);
    return _mm512_mul_ps(_mm512_sub_ps(number, shift), scale);
}

// Pairs of inputs 2q and 2q + 1 of a step with 16 outputs, half h of a block.
template <Kind KIND, bool HAS_OFFSETS>
inline __m512bh pairs(StepReader<KIND> from, const OctetParameters<KIND>& p, int q, int h) {
    __m512 low = scaled<KIND, HAS_OFFSETS>(from.number(q, 2 * h), p.scales[2 * h], p.shifts[2 * h]);
    __m512 high = scaled<KIND, HAS_OFFSETS>(from.number(q, 2 * h + 1), p.scales[2 * h + 1], p.shifts[2 * h + 1]);
    return _mm512_cvtne2ps_pbh(high, low);
}

// Calls body(step, pairs[2][2]) with the pairs q, h of each step of a block.
template <Kind KIND, bool HAS_OFFSETS, class Body>
inline void each_step(const Packed& w, int64_t block, const Body& body) {
    constexpr int64_t STEP_BYTES = KIND == KIND_INT4 ? STEP * PANEL / 2 : STEP * PANEL;
    const uint8_t* values = w.block_values(block);
    for (int64_t first = 0, group = 0; first < w.steps; first += w.group_steps, group++) {
        OctetParameters<KIND> p;
        p.load(w, block, group);
        const int64_t end = std::min(w.steps, first + w.group_steps);
        for (int64_t s = first; s < end; s++) {
            StepReader<KIND> from{values + s * STEP_BYTES};
            __m512bh unpacked[2][2];
#pragma GCC unroll 2
            for (int q = 0; q < 2; q++) {
#pragma GCC unroll 2
                for (int h = 0; h < 2; h++) unpacked[q][h] = pairs<KIND, HAS_OFFSETS>(from, p, q, h);
            }
            body(s, unpacked);
        }
    }
}

// A block's numbers as pairs of bf16, [2 * steps, PANEL].
template <Kind KIND, bool HAS_OFFSETS>
void unpack_pairs(const Packed& w, int64_t block, uint32_t* to) {
    each_step<KIND, HAS_OFFSETS>(w, block, [&](int64_t step, const __m512bh (&unpacked)[2][2]) {
        for (int i = 0; i < 4; i++)
            _mm512_storeu_si512(to + step * 2 * PANEL + 16 * i, (__m512i)unpacked[i / 2][i % 2]);
    });
}

// Calls f(kind, has_offsets), both as types, for a weight that is not bf16.
template <class F>
void with_quantised_kind(const Packed& w, const F& f) {
    using std::bool_constant;
    if (w.kind == KIND_E4M3) return f(std::integral_constant<Kind, KIND_E4M3>{}, bool_constant<false>{});
    if (w.kind == KIND_UINT8 && w.has_offsets)
        return f(std::integral_constant<Kind, KIND_UINT8>{}, bool_constant<true>{});
    if (w.kind == KIND_UINT8) return f(std::integral_constant<Kind, KIND_UINT8>{}, bool_constant<false>{});
    if (w.has_offsets) return f(std::integral_constant<Kind, KIND_INT4>{}, bool_constant<true>{});
    return f(std::integral_constant<Kind, KIND_INT4>{}, bool_constant<false>{});
}
#endif

}  // namespace batchinfer
