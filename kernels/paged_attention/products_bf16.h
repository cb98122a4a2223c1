// Products of attention in bf16 with float32 sums (vdpbf16ps), for bf16 queries over bf16 and 8-bit caches. Keys and
// values are decoded and laid out in pairs of the summed dimension, straight from the cache's blocks.
#pragma once

#include "attention.h"

#if defined(__AVX512BF16__) && defined(__AVX512VBMI__) && defined(__AVX512BW__)
#define BATCHINFER_BF16_PRODUCTS 1

namespace batchinfer {

// Cache of bf16.
struct Bf16Codes {
    // to[head_dim / 2, CHUNK]: pairs of dimensions of 16 keys
    static void pack_keys(const char* const* rows, int64_t head_dim, uint32_t* to) {
        for (int64_t d = 0; d < head_dim; d += 32) {
            __mmask32 mask = lane_mask(head_dim - d, 32);
            __m512i v[16];
            for (int j = 0; j < 16; j++) v[j] = _mm512_maskz_loadu_epi16(mask, rows[j] + 2 * d);
            transpose16(v);
            for (int j = 0; j < 16; j++) _mm512_storeu_si512(to + (d / 2 + j) * CHUNK, v[j]);
        }
    }

    // to[head_dim]: the values of two keys side by side
    static void pack_values(const char* first, const char* second, int64_t head_dim, uint32_t* to) {
        const __m512i low = pair_words(0), high = pair_words(16);
        for (int64_t d = 0; d < head_dim; d += 32) {
            __mmask32 mask = lane_mask(head_dim - d, 32);
            __m512i a = _mm512_maskz_loadu_epi16(mask, first + 2 * d);
            __m512i b = _mm512_maskz_loadu_epi16(mask, second + 2 * d);
            _mm512_storeu_si512(to + d, _mm512_permutex2var_epi16(a, low, b));
            _mm512_storeu_si512(to + d + 16, _mm512_permutex2var_epi16(a, high, b));
        }
    }

   private:
    // Word indices that lay words first.. of two vectors in turn.
    static __m512i pair_words(int first) {
        alignas(64) uint16_t index[32];
        for (int i = 0; i < 16; i++) index[2 * i] = uint16_t(first + i), index[2 * i + 1] = uint16_t(32 + first + i);
        return _mm512_load_si512(index);
    }
};

// Cache of one byte a value: a table of 128 magnitudes gives both bytes of the bf16, bit 7 is the sign.
template <class Format>
struct ByteCodes {
    static void pack_keys(const char* const* rows, int64_t head_dim, uint32_t* to) {
        const Table table;
        const __m512i low = pair_bytes(0), high = pair_bytes(2);
        for (int64_t d = 0; d < head_dim; d += 64) {
            __mmask64 mask = lane_mask(head_dim - d, 64);
            __m512i v[16];
            for (int j = 0; j < 16; j++) v[j] = _mm512_maskz_loadu_epi8(mask, rows[j] + d);
            transpose16(v);
            for (int j = 0; j < 16; j++) {
                __m512i first = table.low_bytes(v[j]), second = table.high_bytes(v[j]);
                uint32_t* pair = to + (d / 2 + 2 * j) * CHUNK;
                _mm512_storeu_si512(pair, _mm512_permutex2var_epi8(first, low, second));
                _mm512_storeu_si512(pair + CHUNK, _mm512_permutex2var_epi8(first, high, second));
            }
        }
    }

    static void pack_values(const char* first, const char* second, int64_t head_dim, uint32_t* to) {
        const Table table;
        // the unpacking below works within 128-bit lanes: this order of dwords makes it come out straight
        const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
        for (int64_t d = 0; d < head_dim; d += 64) {
            __mmask64 mask = lane_mask(head_dim - d, 64);
            __m512i a = _mm512_permutexvar_epi32(order, _mm512_maskz_loadu_epi8(mask, first + d));
            __m512i b = _mm512_permutexvar_epi32(order, _mm512_maskz_loadu_epi8(mask, second + d));
            store_pairs(table, _mm512_unpacklo_epi8(a, b), to + d);
            store_pairs(table, _mm512_unpackhi_epi8(a, b), to + d + 32);
        }
    }

   private:
    struct Table {
        __m512i low[2], high[2];
        Table() {
            static const Bytes bytes;
            for (int i = 0; i < 2; i++) low[i] = _mm512_load_si512(bytes.low + 64 * i);
            for (int i = 0; i < 2; i++) high[i] = _mm512_load_si512(bytes.high + 64 * i);
        }
        __m512i low_bytes(__m512i codes) const { return _mm512_permutex2var_epi8(low[0], index(codes), low[1]); }
        __m512i high_bytes(__m512i codes) const {
            __m512i magnitude = _mm512_permutex2var_epi8(high[0], index(codes), high[1]);
            const __m512i sign = _mm512_set1_epi8(char(0x80));
            return _mm512_ternarylogic_epi64(magnitude, codes, sign, 0xf8);  // magnitude | (codes & sign)
        }
        // bit 7 of an index is ignored
        static __m512i index(__m512i codes) {
            return std::is_same<Format, Int8>::value ? _mm512_abs_epi8(codes) : codes;
        }
    };

    struct Bytes {
        alignas(64) uint8_t low[128], high[128];
        Bytes() {
            for (int code = 0; code < 128; code++) {
                uint16_t value = Bf16::store(Format::load(typename Format::Storage(code)));
                low[code] = uint8_t(value), high[code] = uint8_t(value >> 8);
            }
        }
    };

    static void store_pairs(const Table& table, __m512i codes, uint32_t* to) {
        __m512i low = table.low_bytes(codes), high = table.high_bytes(codes);
        _mm512_storeu_si512(to, _mm512_unpacklo_epi8(low, high));
        _mm512_storeu_si512(to + 16, _mm512_unpackhi_epi8(low, high));
    }

    // Byte indices that make words of bytes 4i + first and 4i + first + 1 of a vector of low and one of high bytes.
    static __m512i pair_bytes(int first) {
        alignas(64) uint8_t index[64];
        for (int i = 0; i < 16; i++) {
            for (int b = 0; b < 2; b++) {
                index[4 * i + 2 * b] = uint8_t(4 * i + first + b);
                index[4 * i + 2 * b + 1] = uint8_t(64 + 4 * i + first + b);
            }
        }
        return _mm512_load_si512(index);
    }
};

struct Bf16Math {
    using Element = uint32_t;  // two bf16
    static constexpr int PER_ELEMENT = 2;
    static constexpr int MAX_ROWS = 6, MAX_GROUPS = 4;

    // query holds bf16 values, so that the rounding is exact.
    static void pack_query(const float* query, int64_t head_dim, uint32_t* to) {
        store_row<Bf16>(query, reinterpret_cast<uint16_t*>(to), head_dim);
        if (head_dim % 2) reinterpret_cast<uint16_t*>(to)[head_dim] = 0;
    }

    static void pack_weights(const float* weights, int groups, uint32_t* to) {
        for (int g = 0; g < groups; g++) {
            __m256bh rounded = _mm512_cvtneps_pbh(_mm512_loadu_ps(weights + 16 * g));
            _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + 8 * g), (__m256i)rounded);
        }
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

// Lays out vectors of a cache in one format.
template <class Codes>
struct Bf16Layout {
    static void pack_keys(const char* const* rows, int64_t head_dim, uint32_t* to, float*) {
        Codes::pack_keys(rows, head_dim, to);
    }

    static void pack_values(const char* const* rows, int64_t head_dim, uint32_t* to) {
        int64_t stride = round_up(head_dim, 64);
        for (int j = 0; j < GROUP / 2; j++) Codes::pack_values(rows[2 * j], rows[2 * j + 1], head_dim, to + j * stride);
    }
};

}  // namespace batchinfer
#endif
