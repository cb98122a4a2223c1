// What the norms share: rows are widened into a buffer of floats that stays in the L1 cache, after the residual sum.
#pragma once

#include "native.h"

namespace batchinfer {

// The sum of term(i) for i in [0, n), added up in the same order on each machine.
template <class Term>
float sum_of(int64_t n, const Term& term) {
    constexpr int PARTS = 16;
    float parts[PARTS] = {};
    int64_t i = 0;
    for (; i + PARTS <= n; i += PARTS)
        for (int j = 0; j < PARTS; j++) parts[j] += term(i + j);
    for (int j = 0; i < n; i++, j++) parts[j] += term(i);
    for (int width = PARTS / 2; width; width /= 2)
        for (int j = 0; j < width; j++) parts[j] += parts[j + width];
    return parts[0];
}

// The rows of x, n dense elements each, `inner` of them an outer stride; strides in elements.
struct Rows {
    const void* x;
    int64_t count, n, outer_stride, inner, inner_stride;

    // The element that row r begins with.
    int64_t place(int64_t r) const { return r / inner * outer_stride + r % inner * inner_stride; }
};

// normalise(row, out) for each row, widened to float32, and its place in out [count, n], dense. With a residual
// [count, n] the row is total = residual + x, rounded to the format, which is stored too; else both are null.
template <class Format, class Normalise>
void norm_rows(const Rows& rows, const void* residual, void* out, void* total, int64_t threads,
               const Normalise& normalise) {
    using Storage = typename Format::Storage;
    int64_t n = rows.n;
    parallel_rows(rows.count, n, threads, [&](int64_t first, int64_t last) {
        thread_local AlignedBuffer<float> memory;
        float* row = memory.at_least(size_t(n));
        for (int64_t r = first; r < last; r++) {
            load_row<Format>(static_cast<const Storage*>(rows.x) + rows.place(r), row, n);
            if (residual) {
                auto other = static_cast<const Storage*>(residual) + r * n;
                auto sum = static_cast<Storage*>(total) + r * n;
                for (int64_t i = 0; i < n; i++) {
                    sum[i] = Format::store(row[i] + Format::load(other[i]));
                    row[i] = Format::load(sum[i]);
                }
            }
            normalise(row, static_cast<Storage*>(out) + r * n);
        }
    });
}

}  // namespace batchinfer
