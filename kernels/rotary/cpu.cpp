// Native rotary: all heads of a token at once.

#include "rotate.h"

// x: [num_tokens, num_heads, head_dim], the last dimension dense, strides in elements; out: dense. One call each for
// queries and keys would wake the threads twice, so both come together.
struct Heads {
    const void* x;
    void* out;
    int64_t num_heads, token_stride, head_stride;
};

extern "C" void rotary(const Heads* q, const Heads* k, const int64_t* positions, const float* cos_sin_cache,
                       int64_t num_tokens, int64_t head_dim, int64_t rotary_dim, int64_t format, int64_t threads) {
    using namespace batchinfer;
    with_float_format(format, [&](auto f) {
        using Format = decltype(f);
        using Storage = typename Format::Storage;
        int64_t row_work = (q->num_heads + k->num_heads) * head_dim;
        parallel_rows(num_tokens, row_work, threads, [&](int64_t first, int64_t last) {
            for (int64_t t = first; t < last; t++) {
                const float* cos_sin = cos_sin_cache + positions[t] * rotary_dim;
                for (const Heads* side : {q, k}) {
                    auto from = static_cast<const Storage*>(side->x) + t * side->token_stride;
                    auto to = static_cast<Storage*>(side->out) + t * side->num_heads * head_dim;
                    for (int64_t h = 0; h < side->num_heads; h++)
                        rotate_head<Format>(from + h * side->head_stride, cos_sin, rotary_dim / 2, head_dim,
                                            to + h * head_dim);
                }
            }
        });
    });
}
