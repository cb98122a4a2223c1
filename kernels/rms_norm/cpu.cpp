// Native rms_norm and add_rms_norm. Rows are widened into a buffer of floats that stays in the L1 cache.

#include <cmath>

#include "../common/native.h"

namespace batchinfer {
namespace {

constexpr int PARTS = 16;  // partial sums of squares, the same on each machine

float sum_of_squares(const float* row, int64_t n) {
    float parts[PARTS] = {};
    int64_t i = 0;
    for (; i + PARTS <= n; i += PARTS)
        for (int j = 0; j < PARTS; j++) parts[j] += row[i + j] * row[i + j];
    for (int j = 0; i < n; i++, j++) parts[j] += row[i] * row[i];
    for (int width = PARTS / 2; width; width /= 2)
        for (int j = 0; j < width; j++) parts[j] += parts[j + width];
    return parts[0];
}

// The quotient is rounded to the format before the weight is applied, and so is the product.
template <class Format>
void normalise(const float* row, const typename Format::Storage* weight, float eps, int64_t n,
               typename Format::Storage* out) {
    float factor = 1.0f / std::sqrt(sum_of_squares(row, n) / float(n) + eps);
    for (int64_t i = 0; i < n; i++) {
        float normed = Format::load(Format::store(row[i] * factor));
        out[i] = Format::store(normed * Format::load(weight[i]));
    }
}

// Rows of x, with `inner` rows an outer stride; residual and total are null for the plain norm.
template <class Format>
void run(const void* x, const void* residual, const void* weight, float eps, int64_t rows, int64_t n,
         int64_t outer_stride, int64_t inner, int64_t inner_stride, void* out, void* total, int64_t threads) {
    using Storage = typename Format::Storage;
    parallel_rows(rows, n, threads, [&](int64_t first, int64_t last) {
        thread_local AlignedBuffer<float> memory;
        float* row = memory.at_least(size_t(n));
        for (int64_t r = first; r < last; r++) {
            const Storage* from = static_cast<const Storage*>(x) + r / inner * outer_stride + r % inner * inner_stride;
            load_row<Format>(from, row, n);
            if (residual) {
                auto other = static_cast<const Storage*>(residual) + r * n;
                auto sum = static_cast<Storage*>(total) + r * n;
                for (int64_t i = 0; i < n; i++) {
                    sum[i] = Format::store(row[i] + Format::load(other[i]));
                    row[i] = Format::load(sum[i]);
                }
            }
            normalise<Format>(row, static_cast<const Storage*>(weight), eps, n, static_cast<Storage*>(out) + r * n);
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
        run<decltype(f)>(x, nullptr, weight, float(eps), rows, n, outer_stride, inner, inner_stride, out, nullptr,
                         threads);
    });
}

// x, residual, out, total: [rows, n], dense. total = residual + x; out = rms_norm(total).
extern "C" void add_rms_norm(const void* x, const void* residual, const void* weight, double eps, int64_t rows,
                             int64_t n, void* out, void* total, int64_t format, int64_t threads) {
    using namespace batchinfer;
    with_float_format(format, [&](auto f) {
        run<decltype(f)>(x, residual, weight, float(eps), rows, n, n, 1, 0, out, total, threads);
    });
}
