"""Plain torch specification of layer_norm and add_layer_norm."""

import torch


def layer_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float) -> torch.Tensor:
    """See the package's `layer_norm`."""
    wide = x.to(torch.float32)
    centred = wide - wide.mean(-1, keepdim=True)
    scaled = centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps) * weight.to(torch.float32)
    return (scaled if bias is None else scaled + bias.to(torch.float32)).to(x.dtype)


def add_layer_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """See the package's `add_layer_norm`."""
    residual = residual + x
    return layer_norm(residual, weight, bias, eps), residual
