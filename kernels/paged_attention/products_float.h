// Products of attention in float32, for any cache format and any machine. The interface is that of products_bf16.h.
#pragma once

#include "chunk.h"
#include "softmax.h"
#include "transpose.h"

namespace batchinfer {

// Writes 16 rows of floats as 16 columns: to[d * stride + j] = from[j * width + d] for d < width, width a multiple of 16.
inline void transpose_rows(const float* from, int64_t width, float* to, int64_t stride) {
#if defined(__AVX512F__)
    for (int64_t d = 0; d < width; d += 16) {
        __m512i rows[16];
        for (int j = 0; j < 16; j++) rows[j] = _mm512_loadu_si512(from + j * width + d);
        transpose16(rows);
        for (int j = 0; j < 16; j++) _mm512_storeu_si512(to + (d + j) * stride, rows[j]);
    }
#else
    for (int64_t d = 0; d < width; d++)
        for (int j = 0; j < 16; j++) to[d * stride + j] = from[j * width + d];
#endif
}

struct FloatMath {
    using Element = float;
    static constexpr int PER_ELEMENT = 1;  // values of the summed dimension in an Element
#if defined(__AVX512F__)
    static constexpr int MAX_ROWS = 6, MAX_GROUPS = 4;
#elif defined(__AVX2__) || defined(__aarch64__)
    static constexpr int MAX_ROWS = 6, MAX_GROUPS = 1;
#else
    static constexpr int MAX_ROWS = 3, MAX_GROUPS = 1;
#endif

    static void load_query(const Problem& p, int64_t offset, float* to) { batchinfer::load_query(p, offset, to); }

    static Vec exp2(Vec x) { return exp2_vec(x); }

    static void store_weights(Vec weights, float* to) { store_vec(to, weights); }

    // c[ROWS, 16 * GROUPS] = c * decay (0 where decay is null) + a[ROWS, steps] b[steps, 16 * GROUPS]
    template <int ROWS, int GROUPS>
    static void multiply(const Product<float>& p) {
        constexpr int N = GROUPS * 16 / LANES;
        Vec sum[ROWS][N];
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; r++) {
#pragma GCC unroll 16
            for (int n = 0; n < N; n++)
                sum[r][n] = p.decay ? load_vec(p.c + r * p.c_stride + n * LANES) * p.decay[r] : Vec{};
        }
        for (int64_t k = 0; k < p.steps; k++) {
            if (p.ahead) p.ahead->step();
            Vec b[N];
#pragma GCC unroll 16
            for (int n = 0; n < N; n++) b[n] = load_vec(p.b + k * p.b_stride + n * LANES);
#pragma GCC unroll 8
            for (int r = 0; r < ROWS; r++) {
                Vec a = splat(p.a[r * p.a_stride + k]);
#pragma GCC unroll 16
                for (int n = 0; n < N; n++) sum[r][n] += a * b[n];
            }
        }
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; r++) {
#pragma GCC unroll 16
            for (int n = 0; n < N; n++) store_vec(p.c + r * p.c_stride + n * LANES, sum[r][n]);
        }
    }
};

// Lays out vectors of a cache in one format.
template <class Format>
struct FloatLayout {
    static void pack_keys(const Group& group, int64_t head_dim, float* to, float* scratch) {
        int64_t width = round_up(head_dim, 16);
        decode(group.keys, group.count, head_dim, scratch, width);
        transpose_rows(scratch, width, to, CHUNK);
    }

    static void pack_values(const Group& group, int64_t head_dim, float* to) {
        decode(group.values, group.count, head_dim, to, round_up(head_dim, 64));
    }

   private:
    static constexpr int64_t BYTES = sizeof(typename Format::Storage);

    static void decode(const char* rows, int count, int64_t head_dim, float* to, int64_t stride) {
        int64_t width = round_up(head_dim, 16);
        for (int j = 0; j < GROUP; j++, rows += head_dim * BYTES, to += stride) {
            int64_t n = j < count ? head_dim : 0;
            load_row<Format>(reinterpret_cast<const typename Format::Storage*>(rows), to, n);
            std::fill(to + n, to + width, 0.0f);
        }
    }
};

}  // namespace batchinfer
