"""Native CPU backend of layer_norm and add_layer_norm."""

import functools
from collections.abc import Callable
from ctypes import c_double, c_int64, c_void_p

import torch
from batchinfer.kernels.common import native


@functools.cache
def _run() -> Callable[..., None]:
    shapes = (c_double, c_int64, c_int64, c_int64, c_int64, c_int64)
    return native.function("layer_norm", "layer_norm", *[c_void_p] * 3, *shapes, c_void_p, c_int64, c_int64)


@functools.cache
def _run_add() -> Callable[..., None]:
    shapes = (c_double, c_int64, c_int64)
    return native.function("layer_norm", "add_layer_norm", *[c_void_p] * 4, *shapes, *[c_void_p] * 2, c_int64, c_int64)


def can_run(x: torch.Tensor, *others: torch.Tensor | None) -> bool:
    return native.can_run("layer_norm", x, *(tensor for tensor in others if tensor is not None))


def layer_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float) -> torch.Tensor:
    """See the package's `layer_norm`."""
    n = x.shape[-1]
    rows, weight = x if x.ndim == 3 and x.stride(-1) == 1 else x.reshape(-1, 1, n).contiguous(), weight.contiguous()
    bias = None if bias is None else bias.contiguous()
    outer, inner, _ = rows.shape
    outer_stride, inner_stride, _ = rows.stride()
    out = torch.empty(x.shape, dtype=x.dtype)
    _run()(
        *(rows.data_ptr(), weight.data_ptr(), native.address(bias), eps),
        *(outer * inner, n, outer_stride, inner, inner_stride),
        *(out.data_ptr(), native.FORMATS[x.dtype], torch.get_num_threads()),
    )
    return out


def add_layer_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """See the package's `add_layer_norm`."""
    x, residual, weight = x.contiguous(), residual.contiguous(), weight.contiguous()
    bias = None if bias is None else bias.contiguous()
    n = x.shape[-1]
    out, total = torch.empty(x.shape, dtype=x.dtype), torch.empty(x.shape, dtype=x.dtype)
    _run_add()(
        *(x.data_ptr(), residual.data_ptr(), weight.data_ptr(), native.address(bias), eps, x.numel() // n, n),
        *(out.data_ptr(), total.data_ptr(), native.FORMATS[x.dtype], torch.get_num_threads()),
    )
    return out, total
