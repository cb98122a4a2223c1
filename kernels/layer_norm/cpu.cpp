// Native layer_norm and add_layer_norm.

#include <cmath>

#include "../common/norm_rows.h"

namespace batchinfer {
namespace {

// All in float32, rounded to the format once. `bias` may be null.
template <class Format>
void run(const Rows& rows, const void* residual, const void* weight, const void* bias, float eps, void* out,
         void* total, int64_t threads) {
    using Storage = typename Format::Storage;
    auto factors = static_cast<const Storage*>(weight), terms = static_cast<const Storage*>(bias);
    int64_t n = rows.n;
    norm_rows<Format>(rows, residual, out, total, threads, [=](float* row, Storage* to) {
        float mean = sum_of(n, [=](int64_t i) { return row[i]; }) / float(n);
        for (int64_t i = 0; i < n; i++) row[i] -= mean;
        float squares = sum_of(n, [=](int64_t i) { return row[i] * row[i]; });
        float factor = 1.0f / std::sqrt(squares / float(n) + eps);
        for (int64_t i = 0; i < n; i++) row[i] = row[i] * factor * Format::load(factors[i]);
        if (terms)
            for (int64_t i = 0; i < n; i++) row[i] += Format::load(terms[i]);
        store_row<Format>(row, to, n);
    });
}

}  // namespace
}  // namespace batchinfer

// x: rows = outer * inner rows of n dense elements, strides in elements; weight: [n]; bias: [n] or null. out: [rows, n],
// dense.
extern "C" void layer_norm(const void* x, const void* weight, const void* bias, double eps, int64_t rows, int64_t n,
                           int64_t outer_stride, int64_t inner, int64_t inner_stride, void* out, int64_t format,
                           int64_t threads) {
    using namespace batchinfer;
    with_float_format(format, [&](auto f) {
        run<decltype(f)>({x, rows, n, outer_stride, inner, inner_stride}, nullptr, weight, bias, float(eps), out,
                         nullptr, threads);
    });
}

// x, residual, out, total: [rows, n], dense. total = residual + x; out = layer_norm(total).
extern "C" void add_layer_norm(const void* x, const void* residual, const void* weight, const void* bias, double eps,
                               int64_t rows, int64_t n, void* out, void* total, int64_t format, int64_t threads) {
    using namespace batchinfer;
    with_float_format(format, [&](auto f) {
        run<decltype(f)>({x, rows, n, n, 1, 0}, residual, weight, bias, float(eps), out, total, threads);
    });
}
