// What becomes of the sums of a product: bias and rounding, and the gate where the outputs are those of a gated layer.
// Shared by the products of int8 and of packed weights.
#pragma once

#include "../common/gate.h"

namespace batchinfer {

constexpr int PANEL = 32;       // outputs in a block of a weight
constexpr int HALF = PANEL / 2;

// A weight's next block, asked for into the L2 cache in `steps` equal steps while another is multiplied. Otherwise the
// first rows would wait for each of its numbers, and the others for none. With very many rows, where that is little, it
// stays at the block's beginning.
class BlockAhead {
   public:
    BlockAhead(const void* from, int64_t bytes, int64_t steps)
        : at_(static_cast<const char*>(from)), rate_(steps > bytes / LINE * MOST ? 0 : (bytes << SHIFT) / steps) {}

    void step(int64_t i) const {
        const char* at = at_ + (i * rate_ >> SHIFT);
        __builtin_prefetch(at, 0, 2);
        if (rate_ > LINE << SHIFT) __builtin_prefetch(at + LINE, 0, 2);
    }

   private:
    static constexpr int64_t LINE = 64, MOST = 16;  // steps for each line
    static constexpr int64_t SHIFT = 8;
    const char* at_;
    int64_t rate_;  // bytes a step, in parts of 2^SHIFT
};

// Rows of results. In a paired weight the first 16 outputs of block b are outputs 16 b of the first half of all,
// the gate, and the others their like in the second half.
struct Outputs {
    void* rows;         // [num_rows, width]
    const float* bias;  // [num_outputs], in the order of the outputs, or null
    int64_t num_outputs, is_paired, gate;

    int64_t width() const { return gate == NO_GATE ? num_outputs : num_outputs / 2; }

    // The output that half h of a block begins with.
    int64_t first_output(int64_t block, int h) const {
        return is_paired ? h * num_outputs / 2 + HALF * block : PANEL * block + HALF * h;
    }
};

template <class Format>
inline void round_panel(const float* sums, typename Format::Storage* to) {
#if defined(BATCHINFER_BF16)
    if constexpr (std::is_same<Format, Bf16>::value) {
        auto low = _mm512_loadu_ps(sums), high = _mm512_loadu_ps(sums + HALF);
        return _mm512_storeu_si512(to, (__m512i)_mm512_cvtne2ps_pbh(high, low));
    }
#endif
    store_row<Format>(sums, to, PANEL);
}

// sums: [PANEL], overwritten, of row `row` with a block.
template <class Format>
inline void finish_row(float* sums, const Outputs& out, int64_t block, int64_t row) {
    using Storage = typename Format::Storage;
    const int64_t left = out.first_output(block, 0), right = out.first_output(block, 1);
    const int64_t width = std::min<int64_t>(PANEL, out.num_outputs - PANEL * block);  // whole where it is paired
    if (out.bias) {
        for (int64_t c = 0; c < std::min<int64_t>(HALF, width); c++) sums[c] += out.bias[left + c];
        for (int64_t c = HALF; c < width; c++) sums[c] += out.bias[right + c - HALF];
    }
    Storage* to = static_cast<Storage*>(out.rows) + row * out.width();
    if (!out.is_paired && width == PANEL) return round_panel<Format>(sums, to + left);
    alignas(64) Storage rounded[PANEL];
    round_panel<Format>(sums, rounded);
    if (out.gate == SILU) return gate_row<Format, SILU>(rounded, rounded + HALF, HALF, to + left);
    if (out.gate == GELU_TANH) return gate_row<Format, GELU_TANH>(rounded, rounded + HALF, HALF, to + left);
    std::memcpy(to + left, rounded, std::min<int64_t>(HALF, width) * sizeof(Storage));
    if (width > HALF) std::memcpy(to + right, rounded + HALF, (width - HALF) * sizeof(Storage));
}

template <class Format>
inline void finish_rows(float* sums, int64_t count, const Outputs& out, int64_t block, int64_t first_row) {
    for (int64_t r = 0; r < count; r++) finish_row<Format>(sums + r * PANEL, out, block, first_row + r);
}

}  // namespace batchinfer
