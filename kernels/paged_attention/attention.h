// What the parts of native paged attention share: the call's arguments and the layout of a chunk of keys.
#pragma once

#include "../common/native.h"

namespace batchinfer {

constexpr int CHUNK = 64;          // keys that are laid out and multiplied at once; chunks start at multiples of it
constexpr int GROUP = 16;          // keys that are laid out at a time
constexpr int64_t SPAN = 8 * CHUNK;  // keys that share one running softmax; spans start at multiples of it
constexpr int64_t TILE_ROWS = 96;  // most rows (queries x query heads of one KV head) of a tile, where a query has fewer

inline int64_t bytes_of(int64_t format) { return format == FP32 ? 4 : format == BF16 || format == FP16 ? 2 : 1; }

inline int64_t round_up(int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }

// Fields are those of `Problem` in cpu.py.
struct Problem {
    const void* q;               // [num_tokens, num_q_heads, head_dim], the last dimension dense
    void* out;                   // [num_tokens, num_q_heads, head_dim], dense, in q's format
    const char* k_cache;         // [num_blocks, num_kv_heads, block_size, head_dim], dense
    const char* v_cache;         // same
    const float* k_scale;        // [num_blocks, num_kv_heads, block_size] or null
    const float* v_scale;        // same
    const int32_t* block_table;  // [num_seqs, max_blocks]
    const int32_t* cu_seqlens_q;  // [num_seqs + 1]
    const int32_t* seq_lens;     // [num_seqs]
    int64_t q_token_stride, q_head_stride;  // elements
    int64_t num_seqs, max_blocks, num_q_heads, num_kv_heads, head_dim, block_size;
    int64_t q_format, cache_format;  // DType
    int64_t sliding_window;      // 0: none
    int64_t threads;
    double scale;

    int64_t heads_per_kv() const { return num_q_heads / num_kv_heads; }
};

// Where the keys and values of a chunk lie; places outside of the sequence or of every query's sight point to zeros.
struct Chunk {
    const char *keys[CHUNK], *values[CHUNK];
    float key_scales[CHUNK], value_scales[CHUNK];
};

// c[rows, n] = c * decay (per row; 0 where null) + a[rows, steps] b[steps, n]. Strides in elements.
template <class Element>
struct Product {
    const Element* a;
    int64_t a_stride;
    const Element* b;
    int64_t b_stride;
    int64_t steps;
    float* c;
    int64_t c_stride;
    const float* decay;
};

#if defined(__AVX512F__)
inline uint64_t lane_mask(int64_t left, int lanes) {
    return left >= 64 ? ~uint64_t(0) : (uint64_t(1) << std::min<int64_t>(left, lanes)) - 1;
}

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
