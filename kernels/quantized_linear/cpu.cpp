// Native quantized_linear: rotates and quantises the rows, then multiplies bytes and adds up in 32 bits. Integer sums
// are exact and the groups' float sums have one order, so that a row's result does not depend on the other rows.

#include "../common/native.h"
#include "packed.h"

namespace batchinfer {
namespace {

constexpr int GROUP = 64;       // inputs that share a scale, and that the rotation mixes
constexpr int COLUMNS = 32;     // outputs in a block of the packed weight
constexpr int TILE_ROWS = 6;    // with COLUMNS, all that the registers hold: integer sums and float sums
constexpr int BLOCK_ROWS = 192; // rows whose bytes stay in the L2 cache while the weight passes
constexpr int ZERO = 128;       // added to signed bytes, as the instruction takes one unsigned operand
constexpr float TINY = 1e-30f;  // a group below this is zero: its scale's inverse would overflow

struct Weight {
    int8_t* values;          // [blocks, groups, GROUP / 4, COLUMNS, 4]
    float* scales;           // [blocks, groups, COLUMNS]
    int32_t* offsets;        // [blocks, groups, COLUMNS]: -ZERO times the sum of the group's bytes
    const float* bias;       // [num_outputs] or null
    int64_t num_inputs, num_outputs, num_groups;
};

struct Rows {
    uint8_t* bytes;  // [rows, groups, GROUP]
    float* scales;   // [rows, groups]
};

// ---- activations

// The Walsh-Hadamard transform, without its factor of 1/8.
#if defined(__AVX512F__)
template <int DISTANCE>
inline __m512 butterfly(__m512 x) {
    __m512i lane = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    __m512i partner = _mm512_xor_si512(lane, _mm512_set1_epi32(DISTANCE));
    constexpr __mmask16 UPPER = DISTANCE == 1 ? 0xaaaa : DISTANCE == 2 ? 0xcccc : DISTANCE == 4 ? 0xf0f0 : 0xff00;
    __m512 other = _mm512_permutexvar_ps(partner, x);
    return _mm512_mask_sub_ps(_mm512_add_ps(other, x), UPPER, other, x);
}

inline void rotate(float* x) {
    __m512 v[4];
    for (int i = 0; i < 4; i++) {
        v[i] = _mm512_loadu_ps(x + 16 * i);
        v[i] = butterfly<8>(butterfly<4>(butterfly<2>(butterfly<1>(v[i]))));
    }
    __m512 a = _mm512_add_ps(v[0], v[1]), b = _mm512_sub_ps(v[0], v[1]);
    __m512 c = _mm512_add_ps(v[2], v[3]), d = _mm512_sub_ps(v[2], v[3]);
    _mm512_storeu_ps(x, _mm512_add_ps(a, c));
    _mm512_storeu_ps(x + 16, _mm512_add_ps(b, d));
    _mm512_storeu_ps(x + 32, _mm512_sub_ps(a, c));
    _mm512_storeu_ps(x + 48, _mm512_sub_ps(b, d));
}
#else
inline void rotate(float* x) {
    for (int distance = 1; distance < GROUP; distance *= 2)
        for (int first = 0; first < GROUP; first += 2 * distance)
            for (int i = first; i < first + distance; i++) {
                float a = x[i], b = x[i + distance];
                x[i] = a + b;
                x[i + distance] = a - b;
            }
}
#endif

// x: GROUP floats, rotated but for the factor of 1/8. Returns the scale; NaN where x holds one.
inline float quantise(const float* x, uint8_t* bytes) {
    Vec most{}, nan{};
    for (int i = 0; i < GROUP; i += LANES) {
        Vec v = load_vec(x + i);
        most = max_vec(v < Vec{} ? -v : v, most);
        nan += v * 0.0f;
    }
    float largest = max_lanes(most), marker = sum_lanes(nan);
    float inverse = largest > TINY ? 127.0f / largest : 0.0f;
    for (int i = 0; i < GROUP; i++) bytes[i] = uint8_t(Int8::store(x[i] * inverse) + ZERO);
    return marker != marker ? marker : largest > TINY ? largest * (0.125f / 127.0f) : 0.0f;
}

// x: `count` inputs, fewer than GROUP only at the end of a row.
template <class Format>
inline float quantise_group(const typename Format::Storage* x, int64_t count, uint8_t* bytes) {
    alignas(64) float values[GROUP];
    if (count == GROUP) {
        load_row<Format>(x, values, GROUP);
    } else {
        load_row<Format>(x, values, count);
        std::fill(values + count, values + GROUP, 0.0f);
    }
    rotate(values);
    return quantise(values, bytes);
}

template <class Format>
void quantise_rows(const void* x, int64_t num_rows, const Weight& w, Rows to, int64_t threads) {
    auto from = static_cast<const typename Format::Storage*>(x);
    parallel_rows(num_rows * w.num_groups, 4 * GROUP, threads, [&](int64_t first, int64_t last) {
        for (int64_t i = first; i < last; i++) {
            int64_t row = i / w.num_groups, column = i % w.num_groups * GROUP;
            int64_t count = std::min<int64_t>(GROUP, w.num_inputs - column);
            to.scales[i] = quantise_group<Format>(from + row * w.num_inputs + column, count, to.bytes + i * GROUP);
        }
    });
}

// ---- weights

// Fills one block of the packed weight; outputs beyond the last become zero.
template <class Format>
void pack_block(const typename Format::Storage* from, const Weight& w, int64_t block) {
    for (int64_t i = 0; i < w.num_groups * COLUMNS; i++) {
        const int64_t group = block * w.num_groups + i / COLUMNS, c = i % COLUMNS;
        const int64_t output = block * COLUMNS + c, input = i / COLUMNS * GROUP;
        uint8_t bytes[GROUP];
        float scale = 0.0f;
        std::memset(bytes, ZERO, sizeof bytes);
        if (output < w.num_outputs) {
            int64_t count = std::min<int64_t>(GROUP, w.num_inputs - input);
            scale = quantise_group<Format>(from + output * w.num_inputs + input, count, bytes);
        }
        int32_t sum = 0;
        for (int k = 0; k < GROUP; k++) {
            int8_t value = int8_t(bytes[k] - ZERO);
            w.values[(group * (GROUP / 4) + k / 4) * 4 * COLUMNS + 4 * c + k % 4] = value;
            sum += value;
        }
        w.scales[group * COLUMNS + c] = scale;
        w.offsets[group * COLUMNS + c] = -ZERO * sum;
    }
}

// ---- the product

// sums: [ROWS, COLUMNS], of `ROWS` rows from `rows` on with block `block` of the weight.
#if defined(__AVX512VNNI__)
template <int ROWS>
void multiply(Rows rows, const Weight& w, int64_t block, float* sums) {
    const int64_t stride = w.num_groups * GROUP;
    const int8_t* values = w.values + block * stride * COLUMNS;
    const float* scales = w.scales + block * w.num_groups * COLUMNS;
    const int32_t* offsets = w.offsets + block * w.num_groups * COLUMNS;
    const uint8_t* bytes = rows.bytes;
    __m512 total[ROWS][2];
#pragma GCC unroll 6
    for (int r = 0; r < ROWS; r++) total[r][0] = total[r][1] = _mm512_setzero_ps();
    for (int64_t g = 0; g < w.num_groups; g++, scales += COLUMNS, offsets += COLUMNS) {
        __m512i sum[ROWS][2];
#pragma GCC unroll 6
        for (int r = 0; r < ROWS; r++) {
            sum[r][0] = _mm512_loadu_si512(offsets);
            sum[r][1] = _mm512_loadu_si512(offsets + 16);
        }
        for (int k = 0; k < GROUP; k += 4, values += 4 * COLUMNS, bytes += 4) {
            __m512i left = _mm512_loadu_si512(values), right = _mm512_loadu_si512(values + 64);
#pragma GCC unroll 6
            for (int r = 0; r < ROWS; r++) {
                int32_t four;
                std::memcpy(&four, bytes + r * stride, 4);
                sum[r][0] = _mm512_dpbusd_epi32(sum[r][0], _mm512_set1_epi32(four), left);
                sum[r][1] = _mm512_dpbusd_epi32(sum[r][1], _mm512_set1_epi32(four), right);
            }
        }
        __m512 left = _mm512_loadu_ps(scales), right = _mm512_loadu_ps(scales + 16);
#pragma GCC unroll 6
        for (int r = 0; r < ROWS; r++) {
            __m512 scale = _mm512_set1_ps(rows.scales[r * w.num_groups + g]);
            total[r][0] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum[r][0]), _mm512_mul_ps(left, scale), total[r][0]);
            total[r][1] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum[r][1]), _mm512_mul_ps(right, scale), total[r][1]);
        }
    }
#pragma GCC unroll 6
    for (int r = 0; r < ROWS; r++) {
        _mm512_storeu_ps(sums + r * COLUMNS, total[r][0]);
        _mm512_storeu_ps(sums + r * COLUMNS + 16, total[r][1]);
    }
}
#else
template <int ROWS>
void multiply(Rows rows, const Weight& w, int64_t block, float* sums) {
    std::fill(sums, sums + ROWS * COLUMNS, 0.0f);
    for (int64_t g = 0; g < w.num_groups; g++) {
        const int64_t group = block * w.num_groups + g;
        for (int r = 0; r < ROWS; r++) {
            int32_t sum[COLUMNS];
            std::memcpy(sum, w.offsets + group * COLUMNS, sizeof sum);
            const uint8_t* bytes = rows.bytes + (r * w.num_groups + g) * GROUP;
            const int8_t* values = w.values + group * GROUP * COLUMNS;
            for (int k = 0; k < GROUP; k += 4, values += 4 * COLUMNS)
                for (int c = 0; c < COLUMNS; c++)
                    for (int i = 0; i < 4; i++) sum[c] += int32_t(bytes[k + i]) * values[4 * c + i];
            const float* scales = w.scales + group * COLUMNS;
            const float scale = rows.scales[r * w.num_groups + g];
            for (int c = 0; c < COLUMNS; c++) sums[r * COLUMNS + c] += float(sum[c]) * (scales[c] * scale);
        }
    }
}
#endif

void multiply_rows(int64_t count, Rows rows, const Weight& w, int64_t block, float* sums) {
    switch (count) {
        case 1: return multiply<1>(rows, w, block, sums);
        case 2: return multiply<2>(rows, w, block, sums);
        case 3: return multiply<3>(rows, w, block, sums);
        case 4: return multiply<4>(rows, w, block, sums);
        case 5: return multiply<5>(rows, w, block, sums);
        default: return multiply<TILE_ROWS>(rows, w, block, sums);
    }
}

template <class Format>
void run(Rows rows, int64_t num_rows, const Weight& w, void* out, int64_t threads) {
    const int64_t blocks = (w.num_outputs + COLUMNS - 1) / COLUMNS;
    const int64_t row_blocks = (num_rows + BLOCK_ROWS - 1) / BLOCK_ROWS;
    parallel_items(row_blocks * blocks, threads, 1, [&](int64_t item) {
        alignas(64) float sums[TILE_ROWS * COLUMNS];
        const int64_t block = item % blocks, column = block * COLUMNS;
        const int64_t width = std::min<int64_t>(COLUMNS, w.num_outputs - column);
        const int64_t end = std::min(num_rows, (item / blocks + 1) * BLOCK_ROWS);
        for (int64_t row = item / blocks * BLOCK_ROWS; row < end; row += TILE_ROWS) {
            const int64_t count = std::min<int64_t>(TILE_ROWS, end - row);
            Rows from = {rows.bytes + row * w.num_groups * GROUP, rows.scales + row * w.num_groups};
            multiply_rows(count, from, w, block, sums);
            for (int64_t r = 0; r < count; r++) {
                if (w.bias)
                    for (int64_t c = 0; c < width; c++) sums[r * COLUMNS + c] += w.bias[column + c];
                auto to = static_cast<typename Format::Storage*>(out) + (row + r) * w.num_outputs + column;
                store_row<Format>(sums + r * COLUMNS, to, width);
            }
        }
    });
}

}  // namespace
}  // namespace batchinfer

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

// x: [num_rows, num_inputs], dense, of x_format; out: [num_rows, num_outputs], dense, of out_format.
extern "C" void quantized_linear(const void* x, int64_t num_rows, const batchinfer::Weight* weight, void* out,
                                 int64_t x_format, int64_t out_format, int64_t threads) {
    using namespace batchinfer;
    thread_local AlignedBuffer<uint8_t> bytes;
    thread_local AlignedBuffer<float> scales;
    Rows rows = {bytes.at_least(size_t(num_rows * weight->num_groups * GROUP)),
                 scales.at_least(size_t(num_rows * weight->num_groups))};
    with_float_format(x_format, [&](auto f) { quantise_rows<decltype(f)>(x, num_rows, *weight, rows, threads); });
    with_float_format(out_format, [&](auto f) { run<decltype(f)>(rows, num_rows, *weight, out, threads); });
}

// x: [num_rows, num_inputs], dense, of x_format; out: [num_rows, num_outputs], dense, of out_format.
extern "C" void packed_linear(const void* x, int64_t num_rows, const batchinfer::Packed* weight, void* out,
                              int64_t x_format, int64_t out_format, int64_t threads) {
    using namespace batchinfer;
    const Packed& w = *weight;
    if (x_format == FP32) return run_packed<FloatProducts<Fp32>>(x, num_rows, w, out, out_format, threads);
    if (x_format == FP16) return run_packed<FloatProducts<Fp16>>(x, num_rows, w, out, out_format, threads);
#if defined(BATCHINFER_BF16_PANELS)
    run_packed<Bf16Products>(x, num_rows, w, out, out_format, threads);
#else
    run_packed<FloatProducts<Bf16>>(x, num_rows, w, out, out_format, threads);
#endif
}
