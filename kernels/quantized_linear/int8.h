// Products in 8 bits: rotates and quantises the rows, then multiplies bytes and adds up in 32 bits. Integer sums are
// exact and the groups' float sums have one order, so that a row's result does not depend on the other rows.
#pragma once

#include "outputs.h"

namespace batchinfer {

constexpr int ROTATION = 64;    // inputs that the rotation mixes
constexpr int GROUP = 192;      // inputs that share a scale, whole rotations; the last group of a row may be shorter
constexpr int COLUMNS = PANEL;  // outputs in a block of the packed weight
constexpr int TILE_ROWS = 6;    // with COLUMNS, all that the registers hold: integer sums and float sums
constexpr int BLOCK_ROWS = 192; // rows whose bytes stay in the L2 cache while the weight passes
constexpr int ZERO = 128;       // added to signed bytes, as the instruction takes one unsigned operand
constexpr float TINY = 1e-30f;  // a group below this is zero: its scale's inverse would overflow

struct Weight {
    int8_t* values;          // [blocks, padded_inputs / 4, COLUMNS, 4]
    float* scales;           // [blocks, groups, COLUMNS]
    int32_t* offsets;        // [blocks, groups, COLUMNS]: -ZERO times the sum of the group's bytes
    const float* bias;       // [num_outputs] or null
    int64_t num_inputs, num_outputs, num_groups, is_paired;

    int64_t padded_inputs() const { return (num_inputs + ROTATION - 1) / ROTATION * ROTATION; }
};

struct Rows {
    uint8_t* bytes;  // [rows, padded_inputs]
    float* scales;   // [rows, groups]
};

// ---- activations

// The Walsh-Hadamard transform, without its factor of 1/8.
#if defined(__AVX512F__)
// Sums in the lanes whose bit DISTANCE is 0, and differences in the others.
template <int DISTANCE>
inline __m512 butterfly(__m512 x) {
    const __m512 one = _mm512_set1_ps(1.0f), minus = _mm512_set1_ps(-1.0f);
    constexpr __mmask16 UPPER = DISTANCE == 1 ? 0xaaaa : DISTANCE == 2 ? 0xcccc : DISTANCE == 4 ? 0xf0f0 : 0xff00;
    __m512 other = DISTANCE == 1   ? _mm512_permute_ps(x, 0xb1)
                   : DISTANCE == 2 ? _mm512_permute_ps(x, 0x4e)
                   : DISTANCE == 4 ? _mm512_shuffle_f32x4(x, x, 0xb1)
                                   : _mm512_shuffle_f32x4(x, x, 0x4e);
    return _mm512_fmadd_ps(x, _mm512_mask_blend_ps(UPPER, one, minus), other);  // a product with 1 or -1 is exact
}

inline void rotate(float* x) {
    __m512 v[4];
#pragma GCC unroll 4
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

inline void round_to_bytes(const float* x, int64_t count, float inverse, uint8_t* bytes) {
    for (int64_t i = 0; i < count; i += 16) {
        __m512i whole = _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_loadu_ps(x + i), _mm512_set1_ps(inverse)));
        __m128i values = _mm512_cvtsepi32_epi8(whole);
        _mm_storeu_si128(reinterpret_cast<__m128i*>(bytes + i), _mm_xor_si128(values, _mm_set1_epi8(char(ZERO))));
    }
}
#else
inline void rotate(float* x) {
    for (int distance = 1; distance < ROTATION; distance *= 2)
        for (int first = 0; first < ROTATION; first += 2 * distance)
            for (int i = first; i < first + distance; i++) {
                float a = x[i], b = x[i + distance];
                x[i] = a + b;
                x[i + distance] = a - b;
            }
}

inline void round_to_bytes(const float* x, int64_t count, float inverse, uint8_t* bytes) {
    for (int64_t i = 0; i < count; i++) bytes[i] = uint8_t(Int8::store(x[i] * inverse) + ZERO);
}
#endif

// x: `count` floats of a group, rotated but for the factor of 1/8. Returns the scale; NaN where x is not finite.
inline float quantise(const float* x, int64_t count, uint8_t* bytes) {
    constexpr int32_t INFINITE = 0x7f800000;
    IntVec most{};  // the bits of floats without sign have the order of the floats
    for (int64_t i = 0; i < count; i += LANES) {
        IntVec bits = (IntVec)load_vec(x + i) & 0x7fffffff;
        most = bits > most ? bits : most;
    }
    int32_t largest_bits = 0;
    for (int i = 0; i < LANES; i++) largest_bits = std::max(largest_bits, most[i]);
    float largest = bit_cast<float>(largest_bits);
    bool is_finite = largest_bits < INFINITE, is_zero = !(largest > TINY);
    round_to_bytes(x, count, is_finite && !is_zero ? 127.0f / largest : 0.0f, bytes);
    return !is_finite ? std::numeric_limits<float>::quiet_NaN() : is_zero ? 0.0f : largest * (0.125f / 127.0f);
}

// x: `count` inputs, at most a group, filled up with zeros to a whole rotation.
template <class Format>
inline float quantise_group(const typename Format::Storage* x, int64_t count, uint8_t* bytes) {
    alignas(64) float values[GROUP];
    const int64_t padded = (count + ROTATION - 1) / ROTATION * ROTATION;
    load_row<Format>(x, values, count);
    std::fill(values + count, values + padded, 0.0f);
    for (int64_t i = 0; i < padded; i += ROTATION) rotate(values + i);
    return quantise(values, padded, bytes);
}

template <class Format>
void quantise_rows(const void* x, int64_t num_rows, const Weight& w, Rows to, int64_t threads) {
    auto from = static_cast<const typename Format::Storage*>(x);
    parallel_rows(num_rows * w.num_groups, GROUP, threads, [&](int64_t first, int64_t last) {
        for (int64_t i = first; i < last; i++) {
            int64_t row = i / w.num_groups, column = i % w.num_groups * GROUP;
            int64_t count = std::min<int64_t>(GROUP, w.num_inputs - column);
            to.scales[i] = quantise_group<Format>(from + row * w.num_inputs + column, count,
                                                  to.bytes + row * w.padded_inputs() + column);
        }
    });
}

// ---- weights

// Fills one block of the packed weight; outputs beyond the last become zero.
template <class Format>
void pack_block(const typename Format::Storage* from, const Weight& w, int64_t block) {
    int8_t* values = w.values + block * w.padded_inputs() * COLUMNS;
    for (int64_t i = 0; i < w.num_groups * COLUMNS; i++) {
        const int64_t group = block * w.num_groups + i / COLUMNS, c = i % COLUMNS;
        const int64_t output = block * COLUMNS + c, input = i / COLUMNS * GROUP;
        const int64_t length = std::min<int64_t>(GROUP, w.padded_inputs() - input);
        uint8_t bytes[GROUP];
        float scale = 0.0f;
        std::memset(bytes, ZERO, sizeof bytes);
        if (output < w.num_outputs) {
            int64_t count = std::min<int64_t>(GROUP, w.num_inputs - input);
            scale = quantise_group<Format>(from + output * w.num_inputs + input, count, bytes);
        }
        int32_t sum = 0;
        for (int64_t k = 0; k < length; k++) {
            int8_t value = int8_t(bytes[k] - ZERO);
            values[(input + k) / 4 * 4 * COLUMNS + 4 * c + k % 4] = value;
            sum += value;
        }
        w.scales[group * COLUMNS + c] = scale;
        w.offsets[group * COLUMNS + c] = -ZERO * sum;
    }
}

// ---- the product

// sums: [ROWS, COLUMNS], of `ROWS` rows from `rows` on with block `block` of the weight; steps from `step` on for `ahead`.
#if defined(__AVX512VNNI__)
template <int ROWS>
void multiply(Rows rows, const Weight& w, int64_t block, float* sums, BlockAhead ahead, int64_t step) {
    const int64_t stride = w.padded_inputs();
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
        const int8_t* end = values + std::min<int64_t>(GROUP, stride - g * GROUP) * COLUMNS;
        for (; values < end; values += 4 * COLUMNS, bytes += 4) {
            ahead.step(step++);
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
void multiply(Rows rows, const Weight& w, int64_t block, float* sums, BlockAhead, int64_t) {
    const int64_t stride = w.padded_inputs();
    std::fill(sums, sums + ROWS * COLUMNS, 0.0f);
    for (int64_t g = 0; g < w.num_groups; g++) {
        const int64_t length = std::min<int64_t>(GROUP, stride - g * GROUP);
        const int64_t group = block * w.num_groups + g;
        for (int r = 0; r < ROWS; r++) {
            int32_t sum[COLUMNS];
            std::memcpy(sum, w.offsets + group * COLUMNS, sizeof sum);
            const uint8_t* bytes = rows.bytes + r * stride + g * GROUP;
            const int8_t* values = w.values + (block * stride + g * GROUP) * COLUMNS;
            for (int64_t k = 0; k < length; k += 4, values += 4 * COLUMNS)
                for (int c = 0; c < COLUMNS; c++)
                    for (int i = 0; i < 4; i++) sum[c] += int32_t(bytes[k + i]) * values[4 * c + i];
            const float* scales = w.scales + group * COLUMNS;
            const float scale = rows.scales[r * w.num_groups + g];
            for (int c = 0; c < COLUMNS; c++) sums[r * COLUMNS + c] += float(sum[c]) * (scales[c] * scale);
        }
    }
}
#endif

void multiply_rows(int64_t count, Rows rows, const Weight& w, int64_t block, float* sums, BlockAhead ahead,
                   int64_t step) {
    switch (count) {
        case 1: return multiply<1>(rows, w, block, sums, ahead, step);
        case 2: return multiply<2>(rows, w, block, sums, ahead, step);
        case 3: return multiply<3>(rows, w, block, sums, ahead, step);
        case 4: return multiply<4>(rows, w, block, sums, ahead, step);
        case 5: return multiply<5>(rows, w, block, sums, ahead, step);
        default: return multiply<TILE_ROWS>(rows, w, block, sums, ahead, step);
    }
}

template <class Format>
void run(Rows rows, int64_t num_rows, const Weight& w, const Outputs& out, int64_t threads) {
    const int64_t blocks = (w.num_outputs + COLUMNS - 1) / COLUMNS;
    const int64_t row_blocks = (num_rows + BLOCK_ROWS - 1) / BLOCK_ROWS;
    parallel_items(row_blocks * blocks, threads, 1, [&](int64_t item) {
        alignas(64) float sums[TILE_ROWS * COLUMNS];
        const int64_t block = item % blocks, end = std::min(num_rows, (item / blocks + 1) * BLOCK_ROWS);
        const int64_t first = item / blocks * BLOCK_ROWS, steps = w.padded_inputs() / 4;
        const int64_t tiles = (end - first + TILE_ROWS - 1) / TILE_ROWS, bytes = w.padded_inputs() * COLUMNS;
        const BlockAhead ahead(w.values + (item + threads) % blocks * bytes, bytes, tiles * steps);
        int64_t step = 0;
        for (int64_t row = first; row < end; row += TILE_ROWS, step += steps) {
            const int64_t count = std::min<int64_t>(TILE_ROWS, end - row);
            Rows from = {rows.bytes + row * w.padded_inputs(), rows.scales + row * w.num_groups};
            multiply_rows(count, from, w, block, sums, ahead, step);
            finish_rows<Format>(sums, count, out, block, row);
        }
    });
}

}  // namespace batchinfer
