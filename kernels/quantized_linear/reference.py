"""Plain torch specification of quantize_weight, quantized_linear, packed_linear and fp8_linear."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from batchinfer.kernels.common.fp8 import decode_finite
from batchinfer.kernels.quantized_linear.fp8 import encode_rows
from batchinfer.kernels.quantized_linear.packed import PackedWeight
from batchinfer.kernels.quantized_linear.weight import COLUMNS, GROUP, ROTATION, QuantizedWeight, can_pair, pair_halves

ROWS_AT_ONCE = 2048  # bounds the float32 copies while packing; a multiple of COLUMNS
TINY = 1e-30 / 8  # a group below this is zero, as the inverse of its scale would overflow
ZERO = 128  # as in int8.h


def quantize_weight(weight: torch.Tensor, is_gated: bool = False) -> QuantizedWeight:
    """See the package's `quantize_weight`."""
    is_paired = is_gated and can_pair(len(weight))
    packed = QuantizedWeight.empty(*weight.shape, weight.device, is_paired)
    weight = pair_halves(weight) if is_paired else weight
    for first in range(0, len(weight), ROWS_AT_ONCE):
        rows = weight[first : first + ROWS_AT_ONCE]
        values, scales = quantize(F.pad(rows, (0, 0, 0, -len(rows) % COLUMNS)))
        blocks = slice(first // COLUMNS, (first + len(values)) // COLUMNS)
        packed.values[blocks] = values.unflatten(1, (-1, 4)).unflatten(0, (-1, COLUMNS)).transpose(1, 2).to(torch.int8)
        packed.scales[blocks] = scales.unflatten(0, (-1, COLUMNS)).transpose(1, 2)
        sums = torch.stack([group.sum(1) for group in values.split(GROUP, dim=1)], dim=1)
        packed.offsets[blocks] = sums.unflatten(0, (-1, COLUMNS)).transpose(1, 2).to(torch.int32) * -ZERO
    return packed


def quantized_linear(x: torch.Tensor, weight: QuantizedWeight, bias: torch.Tensor | None, out: torch.Tensor) -> None:
    """See the package's `quantized_linear`."""
    values, scales = quantize(x)
    weight_values, weight_scales = weight.rows()
    total = torch.zeros(len(x), weight.num_outputs, device=x.device)
    pairs = zip(values.split(GROUP, dim=1), weight_values.split(GROUP, dim=1), strict=True)
    for group, (left, right) in enumerate(pairs):
        # Sums of 192 products of bytes are below 2^24, so that float32 adds them up exactly.
        total += left @ right.to(torch.float32).T * (scales[:, group, None] * weight_scales[:, group])
    out.copy_(total if bias is None else total + bias)


def packed_linear(x: torch.Tensor, weight: PackedWeight, bias: torch.Tensor | None, out: torch.Tensor) -> None:
    """See the package's `packed_linear`."""
    out.copy_(F.linear(x.to(torch.float32), weight.dequantize(x.dtype).to(torch.float32), bias))


def fp8_linear(
    x: torch.Tensor,
    weight: PackedWeight,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    product: Callable[..., Any] = packed_linear,
) -> None:
    """See the package's `fp8_linear`. product: packed_linear of a backend; a float32 has each e4m3 number exactly."""
    codes, scales = encode_rows(x)
    sums = torch.empty(out.shape, device=x.device)
    product(decode_finite(codes), weight, None, sums)
    total = sums.mul_(scales)
    out.copy_(total if bias is None else total.add_(bias))


def quantize(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x: [n, num_inputs]. Whole numbers from -127 to 127 as float32 [n, inputs], filled up to whole rotations, and
    their scales [n, groups]; a group with NaN or infinity has the scale NaN."""
    missing = -x.shape[-1] % ROTATION
    rotated = rotate(F.pad(x.to(torch.float32), (0, missing)).unflatten(-1, (-1, ROTATION))).flatten(1)
    values, scales = [], []
    for group in rotated.split(GROUP, dim=1):
        most = group.abs().amax(1)
        inverse = torch.where(most > TINY, 127 / most, 0)
        values.append((group * inverse.unsqueeze(1)).round().nan_to_num())
        scale = torch.where(most > TINY, most / 127, 0.0)
        scales.append(torch.where(group.isfinite().all(1), scale, torch.nan))
    return torch.cat(values, dim=1), torch.stack(scales, dim=1)


def rotate(x: torch.Tensor) -> torch.Tensor:
    """x: float32 [..., ROTATION], times 1/8 of the Hadamard matrix; sums go pair by pair, as in int8.h."""
    shape, distance = x.shape, 1
    while distance < ROTATION:
        a, b = x.reshape(-1, ROTATION // (2 * distance), 2, distance).unbind(2)
        x = torch.stack((a + b, a - b), dim=2)
        distance *= 2
    return x.reshape(shape) * 0.125
