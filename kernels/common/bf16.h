// Vectors of bf16 by AVX-512, where the processor has instructions for them: then BATCHINFER_BF16 is defined. They round
// to the nearest, ties to even, and make 0 of what is below 2^-126.
#pragma once

#include "native.h"

#if defined(__AVX512BF16__) && defined(__AVX512BW__)
#define BATCHINFER_BF16

namespace batchinfer {

inline __m512 widen(__m256i codes) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(codes), 16)); }

inline __m256i narrow(__m512 x) { return (__m256i)_mm512_cvtneps_pbh(x); }

inline __m512 rounded(__m512 x) { return widen(narrow(x)); }

// The lanes of the vector at element i that lie within n.
inline __mmask16 lanes_within(int64_t i, int64_t n) { return __mmask16(n - i >= 16 ? 0xffff : (1 << (n - i)) - 1); }

inline __m512 load_bf16(const uint16_t* from, __mmask16 lanes) { return widen(_mm256_maskz_loadu_epi16(lanes, from)); }

inline void store_bf16(uint16_t* to, __mmask16 lanes, __m256i codes) { _mm256_mask_storeu_epi16(to, lanes, codes); }

}  // namespace batchinfer
#endif
