"""Layer normalisation, alone and after a residual sum. Called by the decoder's layers."""

from types import ModuleType

import torch
from batchinfer.kernels.layer_norm import cpu, reference


def layer_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float) -> torch.Tensor:
    """(x - mean(x)) / sqrt(variance(x) + eps) * weight + bias over the last dimension.

    x: [..., n], bf16, fp16 or fp32; weight, bias: [n], x's dtype; without a bias None. Returns x's shape and dtype.
    Everything is computed in float32 and rounded once, as torch's own layer_norm does. Raises ValueError on shapes that
    do not fit. Source: Ba, Kiros, Hinton, arXiv 1607.06450.
    """
    _check(x, weight, bias)
    return _backend(x, weight, bias).layer_norm(x, weight, bias, eps)


def add_layer_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(layer_norm(residual + x), residual + x); x and residual: [..., n], one dtype. Inputs are left as they are."""
    _check(x, weight, bias)
    if residual.shape != x.shape:
        raise ValueError(f"residual {tuple(residual.shape)} does not fit x {tuple(x.shape)}")
    return _backend(x, weight, bias, residual).add_layer_norm(x, residual, weight, bias, eps)


def _backend(x: torch.Tensor, *others: torch.Tensor | None) -> ModuleType:
    if x.is_cuda:
        from batchinfer.kernels.layer_norm import gpu  # here, as it brings Triton

        return gpu
    return cpu if cpu.can_run(x, *others) else reference


def _check(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
    for name, values in (("weight", weight), ("bias", bias)):
        if values is not None and values.shape != x.shape[-1:]:
            raise ValueError(f"{name} {tuple(values.shape)} does not fit x {tuple(x.shape)}")
