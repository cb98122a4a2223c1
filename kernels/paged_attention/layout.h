// How a cache's format meets a Math's products: one table of functions a format.
#pragma once

#include "chunk.h"

namespace batchinfer {

// Keys and values from a group's count on come out as zeros, whatever stands in their place.
template <class Math>
struct Layout {
    using Element = typename Math::Element;
    // to[head_dim, CHUNK] columns of keys; scratch [GROUP, padded head_dim]
    void (*pack_keys)(const Group& group, int64_t head_dim, Element* to, float* scratch);
    // to[GROUP, padded head_dim]
    void (*pack_values)(const Group& group, int64_t head_dim, Element* to);

    template <class Packer>
    static Layout of() {
        return {Packer::pack_keys, Packer::pack_values};
    }
};

}  // namespace batchinfer
