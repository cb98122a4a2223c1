// Native quantize_weight, quantized_linear and packed_linear.

#include "int8.h"
#include "packed.h"

// from: [num_outputs, num_inputs], dense; the tensors of `to` are filled.
extern "C" void quantize_weight(const void* from, int64_t format, const batchinfer::Weight* to, int64_t threads) {
    using namespace batchinfer;
    with_float_format(format, [&](auto f) {
        using Format = decltype(f);
        parallel_items((to->num_outputs + COLUMNS - 1) / COLUMNS, threads, 1, [&](int64_t block) {
            pack_block<Format>(static_cast<const typename Format::Storage*>(from), *to, block);
        });
    });
}

// x: [num_rows, num_inputs], dense, of x_format; out: dense, of out_format: [num_rows, num_outputs], or half as wide with
// a gate, for which the weight is paired.
extern "C" void quantized_linear(const void* x, int64_t num_rows, const batchinfer::Weight* weight, void* out,
                                 int64_t x_format, int64_t out_format, int64_t gate, int64_t threads) {
    using namespace batchinfer;
    const Outputs outputs = {out, weight->bias, weight->num_outputs, weight->is_paired, gate};
    thread_local AlignedBuffer<uint8_t> bytes;
    thread_local AlignedBuffer<float> scales;
    Rows rows = {bytes.at_least(size_t(num_rows * weight->padded_inputs())),
                 scales.at_least(size_t(num_rows * weight->num_groups))};
    with_float_format(x_format, [&](auto f) { quantise_rows<decltype(f)>(x, num_rows, *weight, rows, threads); });
    with_float_format(out_format, [&](auto f) { run<decltype(f)>(rows, num_rows, *weight, outputs, threads); });
}

// As quantized_linear.
extern "C" void packed_linear(const void* x, int64_t num_rows, const batchinfer::Packed* weight, void* out,
                              int64_t x_format, int64_t out_format, int64_t gate, int64_t threads) {
    using namespace batchinfer;
    const Packed& w = *weight;
    const Outputs outputs = {out, w.bias, w.num_outputs, w.is_paired, gate};
    if (x_format == FP32) return run_packed<FloatProducts<Fp32>>(x, num_rows, w, outputs, out_format, threads);
    if (x_format == FP16) return run_packed<FloatProducts<Fp16>>(x, num_rows, w, outputs, out_format, threads);
#if defined(BATCHINFER_BF16)
    run_packed<Bf16Products>(x, num_rows, w, outputs, out_format, threads);
#else
    run_packed<FloatProducts<Bf16>>(x, num_rows, w, outputs, out_format, threads);
#endif
}

// Whether packed_linear multiplies bf16 by instructions for it.
extern "C" void has_bf16_products(int64_t* result) {
#if defined(BATCHINFER_BF16)
    *result = 1;
#else
    *result = 0;
#endif
}
