// Number formats, vectors and threads that the native CPU kernels share.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <memory>
#include <type_traits>

#if defined(__AVX512F__)
#include <immintrin.h>
#endif

namespace batchinfer {

enum DType : int64_t { FP32, BF16, FP16, E4M3, E5M2, INT8 };

template <class To, class From>
inline To bit_cast(From from) {
    static_assert(sizeof(To) == sizeof(From), "sizes differ");
    To to;
    std::memcpy(&to, &from, sizeof to);
    return to;
}

// ---- storage formats: load() widens to float32, store() rounds to nearest even; both keep NaN

// A binary float of 1 + EXPONENT + MANTISSA bits. Rounding goes by integer arithmetic on float32 bits, and subnormal
// results by a float32 addition that shifts the mantissa to where it belongs.
template <class Code, int EXPONENT, int MANTISSA, bool HAS_INF>
struct SmallFloat {
    using Storage = Code;
    static constexpr int BIAS = (1 << (EXPONENT - 1)) - 1;
    static constexpr int SHIFT = 23 - MANTISSA;
    static constexpr uint32_t SIGN = 1u << (EXPONENT + MANTISSA);
    static constexpr uint32_t TOP = ((1u << EXPONENT) - 1) << MANTISSA;  // infinity, where there is one

    static float load(Code code) {
        uint32_t magnitude = code & (SIGN - 1);
        uint32_t sign = (code & SIGN) << (31 - EXPONENT - MANTISSA);
        float scaled = bit_cast<float>(magnitude << SHIFT) * bit_cast<float>(uint32_t(254 - BIAS) << 23);
        uint32_t bits = bit_cast<uint32_t>(scaled);
        bool is_special = HAS_INF ? magnitude >= TOP : magnitude == SIGN - 1;
        uint32_t special = HAS_INF ? 0x7f800000u | (magnitude << SHIFT) : 0x7fc00000u;
        return bit_cast<float>((is_special ? special : bits) | sign);
    }

    static Code store(float value) {
        uint32_t bits = bit_cast<uint32_t>(value), magnitude = bits & 0x7fffffffu;
        uint32_t sign = (bits >> (31 - EXPONENT - MANTISSA)) & SIGN;
        constexpr uint32_t ALIGN = uint32_t(127 - BIAS + SHIFT + 1) << 23;
        uint32_t tiny = bit_cast<uint32_t>(bit_cast<float>(magnitude) + bit_cast<float>(ALIGN)) - ALIGN;
        uint32_t odd = (magnitude >> SHIFT) & 1;
        uint32_t rebiased = magnitude - (uint32_t(127 - BIAS) << 23);
        uint32_t normal = (rebiased + ((1u << (SHIFT - 1)) - 1) + odd) >> SHIFT;
        uint32_t code = magnitude < (uint32_t(128 - BIAS) << 23) ? tiny : normal;
        code = HAS_INF && magnitude >= (uint32_t(128 + BIAS) << 23) ? TOP : code;
        return Code((magnitude > 0x7f800000u ? SIGN - 1 : code) | sign);
    }
};

using Fp16 = SmallFloat<uint16_t, 5, 10, true>;
using E4m3 = SmallFloat<uint8_t, 4, 3, false>;  // values beyond 448 must be clamped before store
using E5m2 = SmallFloat<uint8_t, 5, 2, true>;

struct Fp32 {
    using Storage = float;
    static float load(float value) { return value; }
    static float store(float value) { return value; }
};

struct Bf16 {
    using Storage = uint16_t;
    static float load(uint16_t code) { return bit_cast<float>(uint32_t(code) << 16); }
    static uint16_t store(float value) {
        uint32_t bits = bit_cast<uint32_t>(value);
        uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1)) >> 16;
        return uint16_t((bits & 0x7fffffffu) > 0x7f800000u ? 0x7fc0u : rounded);
    }
};

struct Int8 {
    using Storage = int8_t;
    static float load(int8_t code) { return float(code); }
    static int8_t store(float value) {  // |value| <= 127, or NaN, which becomes 0
        constexpr float ROUND = 12582912.0f;  // 1.5 * 2^23: its last bit counts ones
        return int8_t(value == value ? int32_t(bit_cast<uint32_t>(value + ROUND) - bit_cast<uint32_t>(ROUND)) : 0);
    }
};

// Calls f with the format of activations.
template <class F>
void with_float_format(int64_t dtype, const F& f) {
    if (dtype == BF16) return f(Bf16{});
    if (dtype == FP16) return f(Fp16{});
    return f(Fp32{});
}

// Calls f with the format of a KV cache.
template <class F>
void with_cache_format(int64_t dtype, const F& f) {
    if (dtype == E4M3) return f(E4m3{});
    if (dtype == E5M2) return f(E5m2{});
    if (dtype == INT8) return f(Int8{});
    return with_float_format(dtype, f);
}

template <class Format>
inline void load_row(const typename Format::Storage* from, float* to, int64_t n) {
    for (int64_t i = 0; i < n; i++) to[i] = Format::load(from[i]);
}

template <class Format>
inline void store_row(const float* from, typename Format::Storage* to, int64_t n) {
    for (int64_t i = 0; i < n; i++) to[i] = Format::store(from[i]);
}

// ---- float32 vectors of the machine's width

#if defined(__AVX512F__)
constexpr int LANES = 16;
#elif defined(__AVX2__)
constexpr int LANES = 8;
#else
constexpr int LANES = 4;
#endif
typedef float Vec __attribute__((vector_size(4 * LANES)));
typedef int32_t IntVec __attribute__((vector_size(4 * LANES)));

inline Vec load_vec(const float* from) {
    Vec v;
    std::memcpy(&v, from, sizeof v);
    return v;
}

inline void store_vec(float* to, Vec v) { std::memcpy(to, &v, sizeof v); }

inline Vec splat(float x) { return x - Vec{}; }

inline Vec max_vec(Vec a, Vec b) { return a > b ? a : b; }  // b where a is NaN

inline float sum_lanes(Vec v) {
#if defined(__AVX512F__)
    return _mm512_reduce_add_ps((__m512)v);
#else
    float sum = v[0];
    for (int i = 1; i < LANES; i++) sum += v[i];
    return sum;
#endif
}

inline float max_lanes(Vec v) {
#if defined(__AVX512F__)
    return _mm512_reduce_max_ps((__m512)v);
#else
    float best = v[0];
    for (int i = 1; i < LANES; i++) best = v[i] > best ? v[i] : best;
    return best;
#endif
}

// e^x to 1e-7 of its value; exactly 1 at 0; exactly 0 below -87; NaN for NaN; at most e^88.
// x = n ln 2 + r, then the Taylor series of e^r, whose next term is below 2^-27.
inline Vec exp_vec(Vec x) {
    constexpr float ROUND = 12582912.0f, LN2_HIGH = 0.693359375f, LN2_LOW = -2.12194440e-4f;
    Vec low = splat(-87.0f), high = splat(88.0f), zero{};
    Vec clamped = x < low ? low : (x > high ? high : x);
    Vec shifted = clamped * 1.44269504f + ROUND;
    Vec n = shifted - ROUND;
    Vec r = clamped - n * LN2_HIGH - n * LN2_LOW;
    Vec p = r * (1.0f / 5040) + (1.0f / 720);
    p = p * r + (1.0f / 120);
    p = p * r + (1.0f / 24);
    p = p * r + (1.0f / 6);
    p = p * r + 0.5f;
    p = p * r + 1.0f;
    p = p * r + 1.0f;
    Vec power = (Vec)((IntVec)p + ((IntVec)shifted << 23));
    power = x == x ? power : x;
    return x < low ? zero : power;
}

// ---- memory and threads

// Grows and never shrinks, so that calls of one size allocate once. Contents are undefined after `at_least`.
template <class T>
class AlignedBuffer {
   public:
    T* at_least(size_t count) {
        if (count > size_) {
            size_t bytes = (count * sizeof(T) + 63) / 64 * 64;
            data_.reset(static_cast<T*>(std::aligned_alloc(64, bytes)));
            if (!data_) std::abort();
            size_ = count;
        }
        return data_.get();
    }

   private:
    struct Free {
        void operator()(T* p) const { std::free(p); }
    };
    std::unique_ptr<T, Free> data_;
    size_t size_ = 0;
};

// body(i) for i in [0, n), whichever thread is free taking the next `grain` of them.
template <class Body>
void parallel_items(int64_t n, int64_t threads, int64_t grain, const Body& body) {
    if (threads <= 1 || n <= 1) {
        for (int64_t i = 0; i < n; i++) body(i);
        return;
    }
#pragma omp parallel for num_threads(int(threads)) schedule(dynamic, grain)
    for (int64_t i = 0; i < n; i++) body(i);
}

// body(first, last) over equal runs of [0, n); only as many threads as have `least_work` elements each.
template <class Body>
void parallel_rows(int64_t n, int64_t row_work, int64_t threads, const Body& body) {
    constexpr int64_t LEAST_WORK = 16384;  // elements; some 5 us, what waking a thread costs
    int64_t parts = std::max<int64_t>(1, std::min({threads, n, n * row_work / LEAST_WORK}));
    parallel_items(parts, parts, 1, [&](int64_t part) { body(n * part / parts, n * (part + 1) / parts); });
}

}  // namespace batchinfer
