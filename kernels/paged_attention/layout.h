// How a cache's format meets a Math's products: one table of functions a format.
#pragma once

#include "chunk.h"

namespace batchinfer {

// `later` is a group of the next chunk, whose memory is asked for meanwhile. Keys and values from a group's count on
// come out as zeros, whatever stands in their place.
template <class Math>
struct Layout {
    using Element = typename Math::Element;
    // to[head_dim, CHUNK] columns of keys; scratch [GROUP, padded head_dim]
    void (*pack_keys)(const Group& group, const Group& later, int64_t head_dim, Element* to, float* scratch);
    // to[GROUP, padded head_dim]
    void (*pack_values)(const Group& group, const Group& later, int64_t head_dim, Element* to);

    // For tiles of up to few_rows rows: what such a table holds at [rows] skips the laying out.
    int few_rows;
    // queries[rows, steps]; scores[rows, CHUNK], of which the group's are written
    void (*score[Math::FEW_ROWS + 1])(const Group& group, const Group& later, int64_t head_dim, const Element* queries,
                                      int64_t steps, float* scores);
    // weighted[rows, width] = weighted * decay + weights[rows, CHUNK] times the values of n groups
    void (*blend[Math::FEW_ROWS + 1])(const Group* groups, const Group* later, int n, int64_t head_dim,
                                      const Element* weights, const float* decay, float* weighted, int64_t width);

    template <class Packer>
    static Layout of() {
        Layout layout{Packer::pack_keys, Packer::pack_values, Packer::FEW_ROWS, {}, {}};
        if constexpr (Packer::FEW_ROWS > 0) layout.template set_few<Packer, Packer::FEW_ROWS>();
        return layout;
    }

   private:
    template <class Packer, int ROWS>
    void set_few() {
        score[ROWS] = Packer::template score<ROWS>, blend[ROWS] = Packer::template blend<ROWS>;
        if constexpr (ROWS > 1) set_few<Packer, ROWS - 1>();
    }
};

}  // namespace batchinfer
