// act(gate) * up, which gated_activation and the products of gated layers share: silu and tanh-gelu, both by way of the
// sigmoid, since tanh-gelu(x) = x sigmoid(2 u(x)).
#pragma once

#include "bf16.h"

namespace batchinfer {

enum Gate : int64_t { NO_GATE = -1, SILU, GELU_TANH };  // as GATES in gated_activation/cpu.py

// x = act(x) for `count` floats; those up to the next whole vector are overwritten, too.
template <Gate GATE>
void activate(float* values, int64_t count) {
    for (int64_t i = 0; i < count; i += LANES) {
        Vec x = load_vec(values + i), argument = x;
        if (GATE == GELU_TANH) argument = x * (1.0f + 0.044715f * x * x) * 1.5957691216057308f;  // 2 sqrt(2 / pi)
        store_vec(values + i, x / (1.0f + exp_vec(-argument)));
    }
}

#if defined(BATCHINFER_BF16)
// e^x to 3e-6 of its value, of which bf16 sees nothing; NaN for NaN.
// e^x = 2^n 2^r; the polynomial is that of 2^r on [-1/2, 1/2] with the least relative error, of degree 4.
inline __m512 exp_bf16(__m512 x) {
    const __m512 low = _mm512_set1_ps(-126.0f), high = _mm512_set1_ps(126.0f);
    __m512 power = _mm512_mul_ps(x, _mm512_set1_ps(1.44269504f));
    power = _mm512_min_ps(high, _mm512_max_ps(low, power));  // the second operand where one is NaN
    __m512 n = _mm512_roundscale_ps(power, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC), r = _mm512_sub_ps(power, n);
    __m512 p = _mm512_fmadd_ps(r, _mm512_set1_ps(9.58285e-3f), _mm512_set1_ps(5.590643e-2f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(2.4024099e-1f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(6.9312419e-1f));
    return _mm512_scalef_ps(_mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f)), n);
}

template <Gate GATE>
inline __m512 activate_bf16(__m512 x) {
    const __m512 one = _mm512_set1_ps(1.0f);
    __m512 argument = x;
    if (GATE == GELU_TANH) {
        __m512 square = _mm512_mul_ps(x, x), root = _mm512_set1_ps(1.5957691216f);
        argument = _mm512_mul_ps(_mm512_mul_ps(x, root), _mm512_fmadd_ps(square, _mm512_set1_ps(0.044715f), one));
    }
    __m512 divisor = _mm512_add_ps(one, exp_bf16(_mm512_sub_ps(_mm512_setzero_ps(), argument)));
    __m512 inverse = _mm512_rcp14_ps(divisor);
    inverse = _mm512_mul_ps(inverse, _mm512_fnmadd_ps(divisor, inverse, _mm512_set1_ps(2.0f)));
    return _mm512_mul_ps(x, inverse);
}

// As gate_row, by instructions for bf16.
template <Gate GATE>
inline void gate_row_bf16(const uint16_t* gate, const uint16_t* up, int64_t n, uint16_t* out) {
    for (int64_t i = 0; i < n; i += 16) {
        const __mmask16 lanes = lanes_within(i, n);
        __m512 activation = rounded(activate_bf16<GATE>(load_bf16(gate + i, lanes)));
        store_bf16(out + i, lanes, narrow(_mm512_mul_ps(activation, load_bf16(up + i, lanes))));
    }
}
#endif

// The activation is rounded to the format before the product, as two operations of torch would.
template <class Format, Gate GATE>
inline void gate_row(const typename Format::Storage* gate, const typename Format::Storage* up, int64_t n,
                     typename Format::Storage* out) {
#if defined(BATCHINFER_BF16)
    if constexpr (std::is_same<Format, Bf16>::value) return gate_row_bf16<GATE>(gate, up, n, out);
#endif
    constexpr int64_t BLOCK = 256;  // elements that are widened at once
    alignas(64) float values[BLOCK];
    for (int64_t i = 0; i < n; i += BLOCK) {
        int64_t count = std::min(BLOCK, n - i);
        load_row<Format>(gate + i, values, count);
        std::fill(values + count, values + std::min<int64_t>(BLOCK, count + LANES), 0.0f);
        activate<GATE>(values, count);
        for (int64_t j = 0; j < count; j++)
            out[i + j] = Format::store(Format::load(Format::store(values[j])) * Format::load(up[i + j]));
    }
}

}  // namespace batchinfer
