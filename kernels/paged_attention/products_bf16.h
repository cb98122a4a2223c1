// Products of attention in bf16 with float32 sums (vdpbf16ps).
#pragma once

#include "chunk.h"
#include "codes_bf16.h"
#include "softmax.h"

#if BATCHINFER_BF16_PRODUCTS

namespace batchinfer {

struct Bf16Math {
    using Element = uint32_t;  // two bf16
    static constexpr int PER_ELEMENT = 2;
    static constexpr int MAX_ROWS = 6, MAX_GROUPS = 4;

    // q is of bf16.
    static void load_query(const Problem& p, int64_t offset, uint32_t* to) {
        auto words = reinterpret_cast<uint16_t*>(to);
        std::copy_n(static_cast<const uint16_t*>(p.q) + offset, p.head_dim, words);
        if (p.head_dim % 2) words[p.head_dim] = 0;
    }

    // 2^x to 4e-6 of its value, which is to become a bf16, for x <= 0; exactly 1 at 0; NaN for NaN. The coefficients
    // are those of the least largest relative error over [0, 1).
    static Vec exp2(Vec x) {
        __m512 r = _mm512_reduce_ps((__m512)x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);  // x - floor(x)
        __m512 p = _mm512_fmadd_ps(r, _mm512_set1_ps(0.0134266947f), _mm512_set1_ps(0.0522424572f));
        p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(0.241280213f));
        p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(0.693044844f));
        p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f));
        return (Vec)_mm512_scalef_ps(p, (__m512)x);
    }

    static void store_weights(Vec weights, uint32_t* to) {
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), (__m256i)_mm512_cvtneps_pbh((__m512)weights));
    }

    // c[ROWS, 16 * GROUPS] = c * decay (0 where decay is null) + a[ROWS, steps] b[steps, 16 * GROUPS]
    template <int ROWS, int GROUPS>
    static void multiply(const Product<uint32_t>& p) {
        __m512 sum[ROWS][GROUPS];
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; r++) {
#pragma GCC unroll 4
            for (int n = 0; n < GROUPS; n++)
                sum[r][n] = p.decay ? _mm512_mul_ps(_mm512_loadu_ps(p.c + r * p.c_stride + 16 * n),
                                                    _mm512_set1_ps(p.decay[r]))
                                    : _mm512_setzero_ps();
        }
        for (int64_t k = 0; k < p.steps; k++) {
            if (p.ahead) p.ahead->step();
            __m512bh b[GROUPS];
#pragma GCC unroll 4
            for (int n = 0; n < GROUPS; n++) b[n] = (__m512bh)_mm512_loadu_si512(p.b + k * p.b_stride + 16 * n);
#pragma GCC unroll 8
            for (int r = 0; r < ROWS; r++) {
                __m512bh a = (__m512bh)_mm512_set1_epi32(int(p.a[r * p.a_stride + k]));
#pragma GCC unroll 4
                for (int n = 0; n < GROUPS; n++) sum[r][n] = _mm512_dpbf16_ps(sum[r][n], a, b[n]);
            }
        }
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; r++) {
#pragma GCC unroll 4
            for (int n = 0; n < GROUPS; n++) _mm512_storeu_ps(p.c + r * p.c_stride + 16 * n, sum[r][n]);
        }
    }
};

// Keys and values of a cache in one format, laid out for the products above.
template <class Codes>
struct Bf16Layout {
    static void pack_keys(const Group& group, int64_t head_dim, uint32_t* to, float*) {
        for (int64_t d = 0; d < head_dim; d += Codes::DIMS) {
            __m512i pairs[Codes::DIMS / 2];
            Codes::load_keys(group.keys, group.count, head_dim, d, pairs);
            for (int j = 0; j < Codes::DIMS / 2; j++) _mm512_storeu_si512(to + (d / 2 + j) * CHUNK, pairs[j]);
        }
    }

    static void pack_values(const Group& group, int64_t head_dim, uint32_t* to) {
        for (int j = 0; j < GROUP; j += 2, to += round_up(head_dim, 64)) {
            int64_t pair = j * head_dim * Codes::BYTES;
            for (int64_t d = 0; d < head_dim; d += Codes::DIMS) {
                __m512i pairs[Codes::DIMS / 16];
                Codes::load_values(group.values + pair, group.count - j, head_dim, d, pairs);
                for (int i = 0; i < Codes::DIMS / 16; i++) _mm512_storeu_si512(to + d + i * 16, pairs[i]);
            }
        }
    }
};

}  // namespace batchinfer
#endif
