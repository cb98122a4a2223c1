"""Root mean square normalisation, alone and after a residual sum. Called by the decoder's layers."""

from types import ModuleType

import torch
from batchinfer.kernels.rms_norm import cpu, reference


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension.

    x: [..., n], bf16, fp16 or fp32; weight: [n], x's dtype. Returns x's shape and dtype. The mean is taken in float32
    and the quotient rounded to x's dtype before the weight is applied, as Hugging Face does.
    """
    _check(x, weight)
    return _backend(x, weight).rms_norm(x, weight, eps)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(rms_norm(residual + x), residual + x); x and residual: [..., n], one dtype. Inputs are left as they are."""
    _check(x, weight)
    if residual.shape != x.shape:
        raise ValueError(f"residual {tuple(residual.shape)} does not fit x {tuple(x.shape)}")
    return _backend(x, residual, weight).add_rms_norm(x, residual, weight, eps)


def _backend(x: torch.Tensor, *others: torch.Tensor) -> ModuleType:
    if x.is_cuda:
        from batchinfer.kernels.rms_norm import gpu  # here, as it brings Triton

        return gpu
    return cpu if cpu.can_run(x, *others) else reference


def _check(x: torch.Tensor, weight: torch.Tensor) -> None:
    if weight.shape != x.shape[-1:]:
        raise ValueError(f"weight {tuple(weight.shape)} does not fit x {tuple(x.shape)}")
