// Rotation of one head, shared by rotary and by kv_store's fused pass.
#pragma once

#include "../common/native.h"

namespace batchinfer {

// Rotates dimension i with i + half in float32 and rounds; the dimensions from 2 * half on are copied.
// cos_sin: [2 * half], cosines then sines.
template <class Format>
void rotate_head(const typename Format::Storage* from, const float* cos_sin, int64_t half, int64_t head_dim,
                 typename Format::Storage* to) {
    for (int64_t i = 0; i < half; i++) {
        float first = Format::load(from[i]), second = Format::load(from[half + i]);
        float cosine = cos_sin[i], sine = cos_sin[half + i];
        to[i] = Format::store(first * cosine - second * sine);
        to[half + i] = Format::store(second * cosine + first * sine);
    }
    std::copy(from + 2 * half, from + head_dim, to + 2 * half);
}

}  // namespace batchinfer
