// Native gated_activation: silu and tanh-gelu, both by way of the sigmoid, since tanh-gelu(x) = x sigmoid(2 u(x)).

#include "../common/native.h"

namespace batchinfer {
namespace {

enum Kind : int64_t { SILU, GELU_TANH };

constexpr int64_t BLOCK = 256;  // elements that are widened at once

// x = act(x) for BLOCK floats.
template <Kind KIND>
void activate(float* values) {
    for (int64_t i = 0; i < BLOCK; i += LANES) {
        Vec x = load_vec(values + i), argument = x;
        if (KIND == GELU_TANH) argument = x * (1.0f + 0.044715f * x * x) * 1.5957691216057308f;  // 2 sqrt(2 / pi)
        store_vec(values + i, x / (1.0f + exp_vec(-argument)));
    }
}

// The activation is rounded to the format before the product, as two operations of torch would.
template <class Format, Kind KIND>
void run_row(const typename Format::Storage* gate, const typename Format::Storage* up, int64_t n,
             typename Format::Storage* out) {
    alignas(64) float values[BLOCK] = {};
    for (int64_t i = 0; i < n; i += BLOCK) {
        int64_t count = std::min(BLOCK, n - i);
        load_row<Format>(gate + i, values, count);
        activate<KIND>(values);
        for (int64_t j = 0; j < count; j++)
            out[i + j] = Format::store(Format::load(Format::store(values[j])) * Format::load(up[i + j]));
    }
}

template <Kind KIND>
void run(const void* gate_up, int64_t rows, int64_t n, int64_t stride, void* out, int64_t format, int64_t threads) {
    with_float_format(format, [&](auto f) {
        using Format = decltype(f);
        using Storage = typename Format::Storage;
        parallel_rows(rows, n, threads, [&](int64_t first, int64_t last) {
            for (int64_t r = first; r < last; r++) {
                const Storage* gate = static_cast<const Storage*>(gate_up) + r * stride;
                run_row<Format, KIND>(gate, gate + n, n, static_cast<Storage*>(out) + r * n);
            }
        });
    });
}

}  // namespace
}  // namespace batchinfer

// gate_up: [rows, 2 n], rows `stride` elements apart; out: [rows, n], dense. kind: 0 silu, 1 tanh-gelu.
extern "C" void gated_activation(const void* gate_up, int64_t rows, int64_t n, int64_t stride, void* out, int64_t kind,
                                 int64_t format, int64_t threads) {
    using namespace batchinfer;
    if (kind == SILU) return run<SILU>(gate_up, rows, n, stride, out, format, threads);
    run<GELU_TANH>(gate_up, rows, n, stride, out, format, threads);
}
