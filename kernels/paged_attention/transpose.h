// Moving values between registers: masks, tables and 16 rows to 16 columns.
#pragma once

#include "../common/native.h"

namespace batchinfer {

#if defined(__AVX512F__)
inline uint64_t lane_mask(int64_t left, int lanes) {
    return left >= 64 ? ~uint64_t(0) : (uint64_t(1) << std::min<int64_t>(left, lanes)) - 1;
}

// A register of small integers, from a function of their place.
template <class T>
struct Indices {
    alignas(64) T at[64 / sizeof(T)];

    template <class F>
    explicit Indices(const F& f) {
        for (int i = 0; i < int(64 / sizeof(T)); i++) at[i] = T(f(i));
    }
    __m512i load() const { return _mm512_load_si512(at); }
};

// Transposes 16 x 16 dwords.
inline void transpose16(__m512i (&v)[16]) {
    __m512i t[16];
#pragma GCC unroll 8
    for (int i = 0; i < 16; i += 2) {
        t[i] = _mm512_unpacklo_epi32(v[i], v[i + 1]);
        t[i + 1] = _mm512_unpackhi_epi32(v[i], v[i + 1]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 16; i += 4) {
        v[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
        v[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
        v[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
        v[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        t[i] = _mm512_shuffle_i32x4(v[i], v[i + 4], 0x88);
        t[i + 4] = _mm512_shuffle_i32x4(v[i], v[i + 4], 0xdd);
        t[i + 8] = _mm512_shuffle_i32x4(v[i + 8], v[i + 12], 0x88);
        t[i + 12] = _mm512_shuffle_i32x4(v[i + 8], v[i + 12], 0xdd);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        v[i] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0x88);
        v[i + 8] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0xdd);
        v[i + 4] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0x88);
        v[i + 12] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0xdd);
    }
}
#endif

}  // namespace batchinfer
