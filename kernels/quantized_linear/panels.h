// The products of packed_linear: rows of activations with panels of a weight. An output is one chain of additions over
// the inputs in their order, whatever the number of rows, so that a row's bits do not depend on the others.
#pragma once

#include "unpack.h"

namespace batchinfer {

// Rows of activations with dense elements: a float each, or a pair of bf16.
template <class Element>
struct ElementRows {
    const Element* data;
    int64_t stride;  // in elements
};

// ---- any machine, any format of activations

template <class Format>
struct FloatProducts {
    using Element = float;
    using X = Format;
    static constexpr int PER_ELEMENT = 1;
    static constexpr int TILE_ROWS = LANES == 16 ? 12 : 6;
    static constexpr int FUSED_ROWS = 0;
    static constexpr int WIDTH = 2 * LANES;

    static const float* panel(const Packed& w, int64_t block, float* buffer) {
        unpack_floats<Format>(w, block, buffer);
        return buffer;
    }

    // sums: [ROWS, PANEL]; panel: [elements, PANEL]; steps from `step` on for `ahead`
    template <int ROWS>
    static void multiply(ElementRows<float> rows, const float* panel, int64_t elements, float* sums, BlockAhead ahead,
                         int64_t step) {
        for (int first = 0; first < PANEL; first += WIDTH) {
            Vec total[ROWS][2] = {};
            for (int64_t k = 0; k < elements; k++) {
                if (first == 0) ahead.step(step + k);
                Vec left = load_vec(panel + k * PANEL + first), right = load_vec(panel + k * PANEL + first + LANES);
#pragma GCC unroll 16
                for (int r = 0; r < ROWS; r++) {
                    Vec a = splat(rows.data[r * rows.stride + k]);
                    total[r][0] += a * left;
                    total[r][1] += a * right;
                }
            }
            for (int r = 0; r < ROWS; r++) {
                store_vec(sums + r * PANEL + first, total[r][0]);
                store_vec(sums + r * PANEL + first + LANES, total[r][1]);
            }
        }
    }
};

// ---- bf16 by AVX-512

#if defined(BATCHINFER_BF16)
template <int ROWS>
inline void multiply_add(__m512 (&total)[ROWS][2], ElementRows<uint32_t> rows, int64_t k, __m512bh left,
                         __m512bh right) {
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; r++) {
        __m512bh a = (__m512bh)_mm512_set1_epi32(int(rows.data[r * rows.stride + k]));
        total[r][0] = _mm512_dpbf16_ps(total[r][0], a, left);
        total[r][1] = _mm512_dpbf16_ps(total[r][1], a, right);
    }
}

template <int ROWS>
inline void store_sums(const __m512 (&total)[ROWS][2], float* sums) {
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; r++) {
        _mm512_storeu_ps(sums + r * PANEL, total[r][0]);
        _mm512_storeu_ps(sums + r * PANEL + 16, total[r][1]);
    }
}

struct Bf16Products {
    using Element = uint32_t;  // two bf16
    using X = Bf16;
    static constexpr int PER_ELEMENT = 2;
    static constexpr int TILE_ROWS = 12;
    static constexpr int FUSED_ROWS = 10;  // up to these, a weight is unpacked in registers, without a panel

    static const uint32_t* panel(const Packed& w, int64_t block, uint32_t* buffer) {
        if (w.kind == KIND_BF16) return reinterpret_cast<const uint32_t*>(w.block_values(block));
        with_quantised_kind(w, [&](auto kind, auto has_offsets) {
            unpack_pairs<decltype(kind)::value, decltype(has_offsets)::value>(w, block, buffer);
        });
        return buffer;
    }

    template <int ROWS>
    static void multiply(ElementRows<uint32_t> rows, const uint32_t* panel, int64_t elements, float* sums,
                         BlockAhead ahead, int64_t step) {
        __m512 total[ROWS][2] = {};
        for (int64_t k = 0; k < elements; k++, panel += PANEL) {
            ahead.step(step + k);
            multiply_add<ROWS>(total, rows, k, (__m512bh)_mm512_loadu_si512(panel),
                               (__m512bh)_mm512_loadu_si512(panel + 16));
        }
        store_sums<ROWS>(total, sums);
    }

    template <int ROWS>
    static void multiply_fused(ElementRows<uint32_t> rows, const Packed& w, int64_t block, float* sums) {
        with_quantised_kind(w, [&](auto kind, auto has_offsets) {
            __m512 total[ROWS][2] = {};
            constexpr Kind KIND = decltype(kind)::value;
            each_step<KIND, decltype(has_offsets)::value>(
                w, block, [&](int64_t step, const __m512bh (&unpacked)[2][2]) {
                    multiply_add<ROWS>(total, rows, 2 * step, unpacked[0][0], unpacked[0][1]);
                    multiply_add<ROWS>(total, rows, 2 * step + 1, unpacked[1][0], unpacked[1][1]);
                });
            store_sums<ROWS>(total, sums);
        });
    }
};
#endif

// Calls f(count as a type), for count from 1 to MAX.
template <int MAX, class F>
inline void with_count(int64_t count, const F& f) {
    if (MAX == 1 || count == MAX) return f(std::integral_constant<int, MAX>{});
    if constexpr (MAX > 1) with_count<MAX - 1>(count, f);
}

}  // namespace batchinfer
