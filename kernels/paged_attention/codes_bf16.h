// Stored keys and values to bf16 in pairs of the summed dimension, in registers: for queries of bf16 over caches whose
// values bf16 holds exactly. Vectors from `count` on come out as zeros, whatever stands in their place.
#pragma once

#include "transpose.h"

#if defined(__AVX512BF16__) && defined(__AVX512VBMI__) && defined(__AVX512BW__) && defined(__AVX512DQ__)
#define BATCHINFER_BF16_PRODUCTS 1

namespace batchinfer {

// Cache of bf16.
struct Bf16Codes {
    static constexpr int BYTES = 2;
    static constexpr int DIMS = 32;  // dimensions at a time

    // pairs[DIMS / 2]: dimensions d, d + 1, ... of 16 keys.
    static void load_keys(const char* rows, int count, int64_t head_dim, int64_t d, __m512i (&pairs)[DIMS / 2]) {
        __mmask32 mask = lane_mask(head_dim - d, DIMS);
#pragma GCC unroll 16
        for (int j = 0; j < 16; j++)
            pairs[j] = _mm512_maskz_loadu_epi16(j < count ? mask : 0, rows + 2 * (j * head_dim + d));
        transpose16(pairs);
    }

    // pairs[DIMS / 16]: dimensions from d on of the first two values side by side.
    static void load_values(const char* rows, int count, int64_t head_dim, int64_t d, __m512i (&pairs)[DIMS / 16]) {
        __mmask32 mask = lane_mask(head_dim - d, DIMS);
        __m512i a = _mm512_maskz_loadu_epi16(count > 0 ? mask : 0, rows + 2 * d);
        __m512i b = _mm512_maskz_loadu_epi16(count > 1 ? mask : 0, rows + 2 * (head_dim + d));
        pairs[0] = _mm512_permutex2var_epi16(a, pair_words(0), b);
        pairs[1] = _mm512_permutex2var_epi16(a, pair_words(16), b);
    }

   private:
    // Word indices that lay words first.. of two vectors in turn.
    static __m512i pair_words(int first) {
        return _mm512_add_epi16(WORDS.load(), _mm512_set1_epi16(short(first)));
    }

    inline static const Indices<uint16_t> WORDS{[](int i) { return i / 2 + i % 2 * 32; }};
};

// Cache of one byte a value: a table of 128 magnitudes gives both bytes of the bf16, bit 7 is the sign.
template <class Format>
struct ByteCodes {
    static constexpr int BYTES = 1;
    static constexpr int DIMS = 64;

    static void load_keys(const char* rows, int count, int64_t head_dim, int64_t d, __m512i (&pairs)[DIMS / 2]) {
        __mmask64 mask = lane_mask(head_dim - d, DIMS);
        __m512i v[16];
#pragma GCC unroll 16
        for (int j = 0; j < 16; j++)
            v[j] = _mm512_maskz_loadu_epi8(j < count ? mask : 0, rows + j * head_dim + d);
        transpose16(v);
        const Table table;
        const __m512i low = pair_bytes(0), high = pair_bytes(2);
#pragma GCC unroll 16
        for (int j = 0; j < 16; j++) {
            __m512i first = table.low_bytes(v[j]), second = table.high_bytes(v[j]);
            pairs[2 * j] = _mm512_permutex2var_epi8(first, low, second);
            pairs[2 * j + 1] = _mm512_permutex2var_epi8(first, high, second);
        }
    }

    static void load_values(const char* rows, int count, int64_t head_dim, int64_t d, __m512i (&pairs)[DIMS / 16]) {
        __mmask64 mask = lane_mask(head_dim - d, DIMS);
        __m512i a = _mm512_maskz_loadu_epi8(count > 0 ? mask : 0, rows + d);
        __m512i b = _mm512_maskz_loadu_epi8(count > 1 ? mask : 0, rows + head_dim + d);
        // the unpacking below works within 128-bit lanes: this order of dwords makes it come out straight
        const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
        a = _mm512_permutexvar_epi32(order, a), b = _mm512_permutexvar_epi32(order, b);
        const Table table;
        decode(table, _mm512_unpacklo_epi8(a, b), pairs);
        decode(table, _mm512_unpackhi_epi8(a, b), pairs + 2);
    }

   private:
    struct Table {
        __m512i low[2], high[2];
        Table() {
            for (int i = 0; i < 2; i++) low[i] = LOW[i].load(), high[i] = HIGH[i].load();
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

    // One byte of the bf16 of each of 64 magnitudes.
    static Indices<uint8_t> bytes_of(int first, int shift) {
        return Indices<uint8_t>([=](int i) {
            return uint8_t(Bf16::store(Format::load(typename Format::Storage(first + i))) >> shift);
        });
    }

    inline static const Indices<uint8_t> LOW[2] = {bytes_of(0, 0), bytes_of(64, 0)};
    inline static const Indices<uint8_t> HIGH[2] = {bytes_of(0, 8), bytes_of(64, 8)};
    inline static const Indices<uint8_t> PAIRS{[](int i) { return i / 4 * 4 + i / 2 % 2 + i % 2 * 64; }};

    static void decode(const Table& table, __m512i codes, __m512i* pairs) {
        __m512i low = table.low_bytes(codes), high = table.high_bytes(codes);
        pairs[0] = _mm512_unpacklo_epi8(low, high), pairs[1] = _mm512_unpackhi_epi8(low, high);
    }

    // Byte indices that make words of bytes 4i + first and 4i + first + 1 of a vector of low and one of high bytes.
    static __m512i pair_bytes(int first) {
        return _mm512_add_epi8(PAIRS.load(), _mm512_set1_epi8(char(first)));
    }
};

}  // namespace batchinfer
#endif
