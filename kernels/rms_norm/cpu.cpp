// Native rms_norm and add_rms_norm.

#include <cmath>

#include "../common/bf16.h"
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

#if defined(BATCHINFER_BF16)
// The sum of a row's squares, in the order of sum_of. With a residual the row is total = residual + x, which is stored.
inline float squares_of(const uint16_t* x, const uint16_t* residual, uint16_t* total, int64_t n) {
    __m512 parts = _mm512_setzero_ps();
    for (int64_t i = 0; i < n; i += 16) {
        const __mmask16 lanes = lanes_within(i, n);
        __m512 v = load_bf16(x + i, lanes);
        if (residual) {
            __m256i sum = narrow(_mm512_add_ps(v, load_bf16(residual + i, lanes)));
            store_bf16(total + i, lanes, sum);
            v = widen(sum);
        }
        parts = _mm512_fmadd_ps(v, v, parts);
    }
    return sum_lanes((Vec)parts);  // by halves, as sum_of
}

// As run, by instructions for bf16.
void run_bf16(const Rows& rows, const void* residual, const void* weight, float eps, void* out, void* total,
              int64_t threads) {
    using Codes = const uint16_t*;
    const int64_t n = rows.n;
    parallel_rows(rows.count, n, threads, [=](int64_t first, int64_t last) {
        for (int64_t r = first; r < last; r++) {
            Codes row = static_cast<Codes>(rows.x) + rows.place(r), factors = static_cast<Codes>(weight);
            uint16_t* sums = residual ? static_cast<uint16_t*>(total) + r * n : nullptr;
            uint16_t* to = static_cast<uint16_t*>(out) + r * n;
            float squares = squares_of(row, residual ? static_cast<Codes>(residual) + r * n : nullptr, sums, n);
            __m512 factor = _mm512_set1_ps(1.0f / std::sqrt(squares / float(n) + eps));
            for (int64_t i = 0; i < n; i += 16) {
                const __mmask16 lanes = lanes_within(i, n);
                __m512 normed = rounded(_mm512_mul_ps(load_bf16((residual ? sums : row) + i, lanes), factor));
                store_bf16(to + i, lanes, narrow(_mm512_mul_ps(normed, load_bf16(factors + i, lanes))));
            }
        }
    });
}
#endif

// run in the given format.
void run_as(int64_t format, const Rows& rows, const void* residual, const void* weight, float eps, void* out,
            void* total, int64_t threads) {
#if defined(BATCHINFER_BF16)
    if (format == BF16) return run_bf16(rows, residual, weight, eps, out, total, threads);
#endif
    with_float_format(format, [&](auto f) { run<decltype(f)>(rows, residual, weight, eps, out, total, threads); });
}

}  // namespace
}  // namespace batchinfer

// x: rows = outer * inner rows of n dense elements, strides in elements. out: [rows, n], dense.
extern "C" void rms_norm(const void* x, const void* weight, double eps, int64_t rows, int64_t n, int64_t outer_stride,
                         int64_t inner, int64_t inner_stride, void* out, int64_t format, int64_t threads) {
    using namespace batchinfer;
    run_as(format, {x, rows, n, outer_stride, inner, inner_stride}, nullptr, weight, float(eps), out, nullptr, threads);
}

// x, residual, out, total: [rows, n], dense. total = residual + x; out = rms_norm(total).
extern "C" void add_rms_norm(const void* x, const void* residual, const void* weight, double eps, int64_t rows,
                             int64_t n, void* out, void* total, int64_t format, int64_t threads) {
    using namespace batchinfer;
    run_as(format, {x, rows, n, n, 1, 0}, residual, weight, float(eps), out, total, threads);
}
