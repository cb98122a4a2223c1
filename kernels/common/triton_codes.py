"""The 8-bit storage formats of the KV cache in Triton. Codes are bytes in memory, and their bits are made and taken
apart here, so that all devices write the same codes, those without the type too. Used by kv_store and paged_attention.
"""

# Kernels have types of their own.
# mypy: allow-untyped-defs

import torch
import triton
import triton.language as tl
from batchinfer.kernels.common.fp8 import STORAGE_MAX

CODES = {torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2", torch.int8: "int8"}


def code_of(dtype: torch.dtype) -> str:
    """Which storage format a cache dtype is; empty for the wide ones."""
    return CODES.get(dtype, "")


def largest_code(dtype: torch.dtype) -> float:
    return STORAGE_MAX.get(dtype, 1.0)


def as_bytes(cache: torch.Tensor) -> torch.Tensor:
    """What the kernels take for a cache: bytes for an 8-bit one, others as they are."""
    return cache.view(torch.uint8) if cache.dtype in CODES else cache


@triton.jit
def encode(x, CODE: tl.constexpr, LARGEST: tl.constexpr):
    """float32 to codes, uint8: saturating, to the nearest, ties to even; NaN stays NaN, and becomes 0 in int8."""
    limited = tl.minimum(tl.maximum(x, -LARGEST), LARGEST)
    if CODE == "int8":
        whole = (limited + 12582912.0) - 12582912.0  # 1.5 * 2^23: adding it rounds to whole numbers
        code = tl.where(x == x, whole, 0.0).to(tl.int8).to(tl.uint8, bitcast=True)
    elif CODE == "e4m3":
        code = tl.where(x == x, _float_code(limited, 3, 7, 16384.0, 0.015625), 0x7F).to(tl.uint8)
    else:
        code = tl.where(x == x, _float_code(limited, 2, 15, 128.0, 6.103515625e-05), 0x7F).to(tl.uint8)
    return code


@triton.jit
def _float_code(x, MANTISSA: tl.constexpr, BIAS: tl.constexpr, ADDEND: tl.constexpr, LEAST_NORMAL: tl.constexpr):
    """int32 code of a float format of 8 bits. ADDEND: its last bit stands for the format's smallest number."""
    bits = x.to(tl.int32, bitcast=True)
    sign = (bits >> 24) & 0x80
    magnitude = bits & 0x7FFFFFFF
    cut: tl.constexpr = 23 - MANTISSA
    rounded = magnitude + ((1 << (cut - 1)) - 1) + ((magnitude >> cut) & 1)
    normal = (rounded >> cut) - ((127 - BIAS) << MANTISSA)
    small = magnitude.to(tl.float32, bitcast=True) + ADDEND
    subnormal = small.to(tl.int32, bitcast=True) & 0xFF
    return sign | tl.where(magnitude.to(tl.float32, bitcast=True) < LEAST_NORMAL, subnormal, normal)


@triton.jit
def rounding_error(x, weight, inverse, CODE: tl.constexpr):
    """float32 [heads, 1]: sum of squares of what is lost when x * inverse, within a float format's range, is encoded,
    each times its weight."""
    scaled = x.to(tl.float32) * inverse
    lost = scaled - coded(scaled, CODE)
    return tl.sum(lost * lost * weight, axis=1, keep_dims=True)


@triton.jit
def coded(x, CODE: tl.constexpr):
    """float32 within a float format's range, as its codes hold it."""
    return _nearest(x, 3, 24576.0, 0.015625) if CODE == "e4m3" else _nearest(x, 2, 192.0, 6.103515625e-05)


@triton.jit
def _nearest(x, MANTISSA: tl.constexpr, ADDEND: tl.constexpr, LEAST_NORMAL: tl.constexpr):
    """x rounded to the numbers of a float format, as float32; NaN stays. ADDEND as _float_code's, times 1.5."""
    cut: tl.constexpr = 23 - MANTISSA
    bits = x.to(tl.int32, bitcast=True)
    rounded = (bits + ((1 << (cut - 1)) - 1) + ((bits >> cut) & 1)) >> cut << cut
    small = (x + ADDEND) - ADDEND
    return tl.where(tl.abs(x) < LEAST_NORMAL, small, tl.where(x == x, rounded.to(tl.float32, bitcast=True), x))


@triton.jit
def decode(codes, CODE: tl.constexpr, NATIVE: tl.constexpr):
    """Codes, uint8, to float16, which holds each of them exactly. NATIVE: the device has e4m3. NaN stays NaN."""
    if CODE == "int8":
        value = codes.to(tl.int8, bitcast=True).to(tl.float16)
    elif CODE == "e5m2":
        value = (codes.to(tl.uint16) << 8).to(tl.float16, bitcast=True)
    elif NATIVE:
        value = codes.to(tl.float8e4nv, bitcast=True).to(tl.float16)
    else:
        wide = codes.to(tl.uint16)
        bits = ((wide & 0x80) << 8) | ((wide & 0x7F) << 7)
        finite = bits.to(tl.float16, bitcast=True) * 256.0  # exponents are biased by 7 there and by 15 here
        value = tl.where((wide & 0x7F) == 0x7F, float("nan"), finite)
    return value
