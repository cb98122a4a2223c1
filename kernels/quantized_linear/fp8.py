"""Weights of linear layers whose products run in e4m3: what becomes of each kind, and the form for each device. Called
by the package."""

import torch
from batchinfer.kernels.common.fp8 import STORAGE_MAX, encode
from batchinfer.kernels.quantized_linear import packed
from batchinfer.kernels.quantized_linear.gpu_weight import GpuWeight
from batchinfer.kernels.quantized_linear.packed import PackedWeight
from batchinfer.kernels.quantized_linear.stored import Fp8Weight, IntegerWeight
from torch import Tensor

LARGEST = STORAGE_MAX[torch.float8_e4m3fn]
TINY = 1e-30  # a token or channel below this is zero, as the inverse of its scale would overflow
_LARGEST_ZERO = 16  # whole numbers up to here are exact in e4m3, and so is what they leave of 0 to 15
_ROWS_AT_ONCE = 2048  # bounds the float32 copies


def pack_fp8_weight(weight: IntegerWeight | Fp8Weight | Tensor) -> PackedWeight | GpuWeight:
    """See the package's `pack_fp8_weight`."""
    if isinstance(weight, Tensor) or (isinstance(weight, IntegerWeight) and weight.bits > 4):
        weight = by_channel(weight if isinstance(weight, Tensor) else weight.dequantize())
    if not weight.values.is_cuda:
        return packed.pack_weight(weight)
    from batchinfer.kernels.quantized_linear import gpu_fp8  # here, as it brings Triton

    return gpu_fp8.pack_weight(weight)


def by_channel(weight: Tensor) -> Fp8Weight:
    """[N, K] in e4m3, with a scale an output: its largest magnitude becomes 448."""
    values = torch.empty(weight.shape, dtype=torch.float8_e4m3fn, device=weight.device)
    scales = torch.empty(len(weight), 1, device=weight.device)
    for first in range(0, len(weight), _ROWS_AT_ONCE):
        rows = slice(first, first + _ROWS_AT_ONCE)
        values[rows], scales[rows] = encode_rows(weight[rows])
    return Fp8Weight(values, scales, (1, weight.shape[1]))


def encode_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """x: [n, k]. e4m3 [n, k] and scales float32 [n, 1]: a row's largest magnitude / 448. A row with NaN or infinity has
    the scale NaN, and one below TINY is zero."""
    wide = x.to(torch.float32)
    most = wide.abs().amax(1, keepdim=True)
    inverse = torch.where(most > TINY, torch.full_like(most, LARGEST) / most, 0.0)  # a number / x would round twice
    codes = encode((wide * inverse).nan_to_num(0.0), torch.float8_e4m3fn)
    scales = torch.where(most > TINY, most / LARGEST, 0.0)
    return codes, torch.where(most.isfinite(), scales, torch.nan)


def centred(weight: IntegerWeight) -> IntegerWeight:
    """The same numbers as float32 has them, but with offsets where a zero is none of the whole numbers that leave
    others exact in e4m3."""
    zeros = weight.zeros
    if zeros is None or bool(((zeros == zeros.round()) & (zeros >= 0) & (zeros <= _LARGEST_ZERO)).all()):
        return weight
    scales = weight.scales.to(torch.float32)
    return IntegerWeight(
        weight.bits, weight.group_size, weight.values, scales, offsets=-zeros * scales, permutation=weight.permutation
    )
