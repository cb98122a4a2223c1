"""Plain torch specification of quantized_linear."""

import torch
from batchinfer.kernels.quantized_linear.weight import QuantizedWeight, rotate, split_groups

TINY = 1e-30 / 8  # a group below this is zero, as the inverse of its scale would overflow


def quantized_linear(x: torch.Tensor, weight: QuantizedWeight, bias: torch.Tensor | None, out: torch.Tensor) -> None:
    """See the package's `quantized_linear`."""
    values, scales = quantize_activations(x)
    weight_values, weight_scales = weight.rows()
    total = torch.zeros(len(x), weight.num_outputs, device=x.device)
    for group in range(values.shape[1]):
        # Sums of 64 products of bytes are below 2^24, so that float32 adds them up exactly.
        sums = values[:, group] @ weight_values[:, group].to(torch.float32).T
        total += sums * (scales[:, group, None] * weight_scales[:, group])
    out.copy_(total if bias is None else total + bias)


def quantize_activations(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Whole numbers from -127 to 127 as float32 [n, groups, GROUP], and their scales [n, groups]; NaN stays NaN, in the
    scale."""
    rotated = rotate(split_groups(x))
    most = rotated.abs().amax(-1)
    inverse = torch.where(most > TINY, 127 / most, 0)
    values = (rotated * inverse.unsqueeze(-1)).round().nan_to_num()
    scales = torch.where(most > TINY, most / 127, torch.zeros_like(most))
    return values, torch.where(rotated.isfinite().all(-1), scales, torch.nan)
