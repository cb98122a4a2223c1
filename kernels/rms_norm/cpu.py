"""Native CPU backend of rms_norm and add_rms_norm."""

import functools
from collections.abc import Callable
from ctypes import c_double, c_int64, c_void_p

import torch
from batchinfer.kernels.common import native


@functools.cache
def _run() -> Callable[..., None]:
    shapes = (c_double, c_int64, c_int64, c_int64, c_int64, c_int64)
    return native.function("rms_norm", "rms_norm", c_void_p, c_void_p, *shapes, c_void_p, c_int64, c_int64)


@functools.cache
def _run_add() -> Callable[..., None]:
    shapes = (c_double, c_int64, c_int64)
    pointers = (c_void_p, c_void_p)
    return native.function("rms_norm", "add_rms_norm", c_void_p, *pointers, *shapes, *pointers, c_int64, c_int64)


def can_run(x: torch.Tensor, *others: torch.Tensor) -> bool:
    return native.can_run("rms_norm", x, *others)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """See the package's `rms_norm`."""
    n = x.shape[-1]
    rows, weight = x if x.ndim == 3 and x.stride(-1) == 1 else x.reshape(-1, 1, n).contiguous(), weight.contiguous()
    outer, inner, _ = rows.shape
    outer_stride, inner_stride, _ = rows.stride()
    out = torch.empty(x.shape, dtype=x.dtype)
    _run()(
        *(rows.data_ptr(), weight.data_ptr(), eps),
        *(outer * inner, n, outer_stride, inner, inner_stride),
        *(out.data_ptr(), native.FORMATS[x.dtype], torch.get_num_threads()),
    )
    return out


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """See the package's `add_rms_norm`."""
    x, residual, weight = x.contiguous(), residual.contiguous(), weight.contiguous()
    n = x.shape[-1]
    out, total = torch.empty_like(x), torch.empty_like(x)
    _run_add()(
        *(x.data_ptr(), residual.data_ptr(), weight.data_ptr(), eps, x.numel() // n, n),
        *(out.data_ptr(), total.data_ptr(), native.FORMATS[x.dtype], torch.get_num_threads()),
    )
    return out, total
