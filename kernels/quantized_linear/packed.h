// packed_linear: lays out the activations, shares the weight's blocks among the threads and writes the results.
#pragma once

#include "panels.h"

namespace batchinfer {

constexpr int64_t PANEL_ROWS = 2040;  // rows that one unpacking of a block serves; they stay in the outer caches

// Elements of a row, from x [num_inputs] to `to` [STEP * steps / PER_ELEMENT].
template <class Products>
void lay_out_row(const typename Products::X::Storage* x, const Packed& w, typename Products::Element* to) {
    using X = typename Products::X;
    if constexpr (Products::PER_ELEMENT == 2) {
        auto pairs = reinterpret_cast<typename X::Storage*>(to);
        if (!w.inputs) std::memcpy(to, x, size_t(w.num_inputs) * sizeof *x);
        else
            for (int64_t k = 0; k < STEP * w.steps; k++) pairs[k] = w.inputs[k] < 0 ? 0 : x[w.inputs[k]];
    } else {
        if (!w.inputs) load_row<X>(x, to, w.num_inputs);
        else
            for (int64_t k = 0; k < STEP * w.steps; k++) to[k] = w.inputs[k] < 0 ? 0.0f : X::load(x[w.inputs[k]]);
    }
}

// x itself where it can be read as it lies; else a copy, whose rows do not all fall on the same lines of a cache.
template <class Products>
ElementRows<typename Products::Element> lay_out_rows(const void* x, int64_t num_rows, const Packed& w,
                                                     int64_t threads) {
    using Element = typename Products::Element;
    using Storage = typename Products::X::Storage;
    constexpr bool SAME_FORMAT = sizeof(Storage) * Products::PER_ELEMENT == sizeof(Element);
    const int64_t elements = STEP * w.steps / Products::PER_ELEMENT;
    if (SAME_FORMAT && !w.inputs && (num_rows == 1 || elements * sizeof(Element) % 2048 != 0))
        return {static_cast<const Element*>(x), elements};
    const int64_t line = 64 / sizeof(Element), stride = ((elements + line - 1) / line | 1) * line;
    thread_local AlignedBuffer<Element> memory;
    Element* rows = memory.at_least(size_t(num_rows * stride));
    parallel_rows(num_rows, elements, threads, [&](int64_t first, int64_t last) {
        for (int64_t r = first; r < last; r++)
            lay_out_row<Products>(static_cast<const Storage*>(x) + r * w.num_inputs, w, rows + r * stride);
    });
    return {rows, stride};
}

// Few rows: each number of the weight is unpacked where it is multiplied.
template <class Products, class Format>
void run_fused(ElementRows<typename Products::Element> rows, int64_t num_rows, const Packed& w,
               const Outputs& out, int64_t threads) {
    parallel_items(w.blocks(), threads, 4, [&](int64_t block) {
        alignas(64) float sums[Products::TILE_ROWS * PANEL];
        with_count<Products::FUSED_ROWS>(num_rows, [&](auto count) {
            Products::template multiply_fused<decltype(count)::value>(rows, w, block, sums);
        });
        finish_rows<Format>(sums, num_rows, out, block, 0);
    });
}

// Many rows: a block is unpacked once into a panel that stays in the caches.
template <class Products, class Format>
void run_panels(ElementRows<typename Products::Element> rows, int64_t num_rows, const Packed& w,
                const Outputs& out, int64_t threads) {
    using Element = typename Products::Element;
    const int64_t elements = STEP * w.steps / Products::PER_ELEMENT, blocks = w.blocks();
    const int64_t row_blocks = (num_rows + PANEL_ROWS - 1) / PANEL_ROWS;
    parallel_items(row_blocks * blocks, threads, 1, [&](int64_t item) {
        thread_local AlignedBuffer<Element> memory;
        alignas(64) float sums[Products::TILE_ROWS * PANEL];
        const int64_t block = item % blocks, end = std::min(num_rows, (item / blocks + 1) * PANEL_ROWS);
        const Element* panel = Products::panel(w, block, memory.at_least(size_t(elements * PANEL)));
        const int64_t first = item / blocks * PANEL_ROWS, next = (item + threads) % blocks;
        const int64_t tiles = (end - first + Products::TILE_ROWS - 1) / Products::TILE_ROWS;
        const BlockAhead ahead(w.block_values(next), w.steps * w.step_bytes(), tiles * elements);
        int64_t step = 0;
        for (int64_t row = first; row < end; row += Products::TILE_ROWS, step += elements) {
            const int64_t count = std::min<int64_t>(Products::TILE_ROWS, end - row);
            with_count<Products::TILE_ROWS>(count, [&](auto rows_at_once) {
                Products::template multiply<decltype(rows_at_once)::value>({rows.data + row * rows.stride, rows.stride},
                                                                           panel, elements, sums, ahead, step);
            });
            finish_rows<Format>(sums, count, out, block, row);
        }
    });
}

template <class Products>
void run_packed(const void* x, int64_t num_rows, const Packed& w, const Outputs& out, int64_t out_format,
                int64_t threads) {
    if (num_rows == 0) return;
    auto rows = lay_out_rows<Products>(x, num_rows, w, threads);
    with_float_format(out_format, [&](auto f) {
        using Format = decltype(f);
        if constexpr (Products::FUSED_ROWS > 0)
            if (w.kind != KIND_BF16 && num_rows <= Products::FUSED_ROWS)
                return run_fused<Products, Format>(rows, num_rows, w, out, threads);
        run_panels<Products, Format>(rows, num_rows, w, out, threads);
    });
}

}  // namespace batchinfer
