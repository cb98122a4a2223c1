// Native gated_activation.

#include "../common/gate.h"

namespace batchinfer {
namespace {

template <Gate GATE>
void run(const void* gate_up, int64_t rows, int64_t n, int64_t stride, void* out, int64_t format, int64_t threads) {
    with_float_format(format, [&](auto f) {
        using Format = decltype(f);
        using Storage = typename Format::Storage;
        parallel_rows(rows, n, threads, [&](int64_t first, int64_t last) {
            for (int64_t r = first; r < last; r++) {
                const Storage* gate = static_cast<const Storage*>(gate_up) + r * stride;
                gate_row<Format, GATE>(gate, gate + n, n, static_cast<Storage*>(out) + r * n);
            }
        });
    });
}

}  // namespace
}  // namespace batchinfer

// gate_up: [rows, 2 n], rows `stride` elements apart; out: [rows, n], dense. gate: SILU or GELU_TANH.
extern "C" void gated_activation(const void* gate_up, int64_t rows, int64_t n, int64_t stride, void* out, int64_t gate,
                                 int64_t format, int64_t threads) {
    using namespace batchinfer;
    if (gate == SILU) return run<SILU>(gate_up, rows, n, stride, out, format, threads);
    run<GELU_TANH>(gate_up, rows, n, stride, out, format, threads);
}
