// What the parts of native paged attention share: the call's arguments and the shape of a product.
#pragma once

#include "../common/key_offset.h"
#include "../common/native.h"

namespace batchinfer {

constexpr int CHUNK = 128;         // keys that are laid out and multiplied at once; chunks start at multiples of it
constexpr int GROUP = 16;          // keys that are laid out at a time
constexpr int64_t SPAN = 4 * CHUNK;  // keys that share one running softmax; spans start at multiples of it
constexpr int64_t TILE_ROWS = 192;  // most rows (queries x query heads of one KV head) of a tile, where a query has fewer
constexpr float LOG2_E = 1.44269504f;

inline int64_t bytes_of(int64_t format) { return format == FP32 ? 4 : format == BF16 || format == FP16 ? 2 : 1; }

inline int64_t round_up(int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }

// Fields are those of `Problem` in cpu.py.
struct Problem {
    const void* q;               // [num_tokens, num_q_heads, head_dim], the last dimension dense
    void* out;                   // [num_tokens, num_q_heads, head_dim], dense, in q's format
    const char* k_cache;         // [num_blocks, num_kv_heads, block_size, head_dim], each block dense
    const char* v_cache;         // same
    const float* k_scale;        // [num_blocks, num_kv_heads, block_size], or [num_kv_heads], or null
    const float* v_scale;        // same
    const float* sinks;          // [num_q_heads] or null
    const float* k_offset;       // [segments, num_kv_heads, head_dim], what stored keys lack, or null
    const int32_t* block_table;  // [num_seqs, max_blocks]
    const int32_t* cu_seqlens_q;  // [num_seqs + 1]
    const int32_t* seq_lens;     // [num_seqs]
    int64_t q_token_stride, q_head_stride;  // elements
    int64_t block_stride;        // bytes from a block of either cache to the next
    int64_t num_seqs, max_blocks, num_q_heads, num_kv_heads, head_dim, block_size;
    int64_t q_format, cache_format;  // DType
    int64_t scales_per_token;    // whether the scales are of the first shape
    int64_t sliding_window;      // 0: none
    int64_t threads;
    double scale;
    double soft_cap;             // 0: none

    int64_t heads_per_kv() const { return num_q_heads / num_kv_heads; }
    int64_t row_bytes() const { return head_dim * bytes_of(cache_format); }
    // Bytes from the beginning of either cache.
    int64_t place_of(int64_t block, int64_t kv_head, int64_t at) const {
        return block * block_stride + (kv_head * block_size + at) * row_bytes();
    }
    int64_t scale_of(int64_t block, int64_t kv_head, int64_t at) const {
        return (block * num_kv_heads + kv_head) * block_size + at;
    }
    float static_key_scale(int64_t kv_head) const { return k_scale && !scales_per_token ? k_scale[kv_head] : 1.0f; }
    float static_value_scale(int64_t kv_head) const { return v_scale && !scales_per_token ? v_scale[kv_head] : 1.0f; }
};

// A query as floats; its place in elements.
inline void load_query(const Problem& p, int64_t offset, float* to) {
    with_float_format(p.q_format, [&](auto format) {
        using Format = decltype(format);
        load_row<Format>(static_cast<const typename Format::Storage*>(p.q) + offset, to, p.head_dim);
    });
}

// Memory that is asked for, into the L2 cache, a little at a time while something is computed: asked for at once, most
// of it would wait for the rest, and what is computed with it.
class Ahead {
   public:
    void add(const char* from, int64_t bytes) { parts_[count_++] = {from, from + bytes}; }

    void step() {
        if (first_ == count_) return;
        Part& part = parts_[first_];
        for (int i = 0; i < LINES; i++) __builtin_prefetch(part.at + i * 64, 0, 2);
        part.at += LINES * 64;
        if (part.at >= part.end) first_++;
    }

    void rest() {
        while (first_ < count_) step();
    }

   private:
    static constexpr int LINES = 4;  // a step: with one for each pair of numbers summed, all of a chunk of 16-bit ones
    struct Part {
        const char *at, *end;
    };
    Part parts_[CHUNK / GROUP];
    int first_ = 0, count_ = 0;
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
    Ahead* ahead;  // goes on with each step; or null
};

// Splits a product into blocks of rows and groups of 16 columns that fit the registers.
template <class Math, int ROWS, int GROUPS>
void multiply_block(int64_t rows, int64_t groups, const Product<typename Math::Element>& p) {
    if constexpr (ROWS > 1) {
        if (rows < ROWS) return multiply_block<Math, ROWS - 1, GROUPS>(rows, groups, p);
    }
    if constexpr (GROUPS > 1) {
        if (groups < GROUPS) return multiply_block<Math, ROWS, GROUPS - 1>(rows, groups, p);
    }
    Math::template multiply<ROWS, GROUPS>(p);
}

// At most Math::MAX_ROWS rows.
template <class Math>
void multiply_rows(int64_t rows, int64_t groups, const Product<typename Math::Element>& p) {
    for (int64_t g = 0; g < groups; g += Math::MAX_GROUPS) {
        Product<typename Math::Element> block = p;
        block.b += g * 16, block.c += g * 16;
        multiply_block<Math, Math::MAX_ROWS, Math::MAX_GROUPS>(rows, groups - g, block);
    }
}

}  // namespace batchinfer
