// Native rms_norm and add_rms_norm.

#include <cmath>

#include "../common/norm_rows.h"

namespace batchinfer {
namespace {

// The quotient is rounded to the format before the weight is applied, and so is the product.
template <class Format>
void run(const Rows& rows, const void* residual, const void* weight, float eps, void* out, void* total,
         int64_t threads) {
    using Storage = typename Format::Storage;
    auto factors = static_cast<const Storage*>(weight);
    int64_t n = rows.n;
    norm_rows<Format>(rows, residual, out, total, threads, [=](const float* row, Storage* to) {
        float squares = sum_of(n, [=](int64_t i) { return row[i] * row[i]; });
        float factor = 1.0f / std::sqrt(squares / float(n) + eps);
        for (int64_t i = 0; i < n; i++) {
            float normed = Format::load(Format::store(row[i] * factor));
            to[i] = Format::store(normed * Format::load(factors[i]));
        }
    });
}

}  // namespace
}  // namespace batchinfer

// x: rows = outer * inner rows of n dense elements, strides in elements. out: [rows, n], dense.
extern "C" void rms_norm(const void* x, const void* weight, double eps, int64_t rows, int64_t n, int64_t outer_stride,
                         int64_t inner, int64_t inner_stride, void* out, int64_t format, int64_t threads) {
    using namespace batchinfer;
    with_float_format(format, [&](auto f) {
        run<decltype(f)>({x, rows, n, outer_stride, inner, inner_stride}, nullptr, weight, float(eps), out, nullptr,
                         threads);
    });
}

// x, residual, out, total: [rows, n], dense. total = residual + x; out = rms_norm(total).
extern "C" void add_rms_norm(const void* x, const void* residual, const void* weight, double eps, int64_t rows,
                             int64_t n, void* out, void* total, int64_t format, int64_t threads) {
    using namespace batchinfer;
    with_float_format(format, [&](auto f) {
        run<decltype(f)>({x, rows, n, n, 1, 0}, residual, weight, float(eps), out, total, threads);
    });
}
