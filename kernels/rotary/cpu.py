"""Native CPU backend of rotary."""

import ctypes
import functools
from collections.abc import Callable
from ctypes import c_int64, c_void_p

import torch
from batchinfer.kernels.common import native


class Heads(ctypes.Structure):
    """As in cpu.cpp."""

    _fields_ = (
        *((name, c_void_p) for name in ("x", "out")),
        *((name, c_int64) for name in ("num_heads", "token_stride", "head_stride")),
    )

    @classmethod
    def of(cls, x: torch.Tensor, out: torch.Tensor) -> "Heads":
        return cls(x.data_ptr(), out.data_ptr(), x.shape[1], *x.stride()[:2])


@functools.cache
def _run() -> Callable[..., None]:
    pointers = (ctypes.POINTER(Heads), ctypes.POINTER(Heads), c_void_p, c_void_p)
    return native.function("rotary", "rotary", *pointers, *[c_int64] * 5)


def can_run(q: torch.Tensor, k: torch.Tensor) -> bool:
    return native.can_run("rotary", q, k)


def rotary(
    q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor, cos_sin_cache: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """See the package's `rotary`."""
    q, k = native.dense_rows(q), native.dense_rows(k)
    positions, cos_sin_cache = positions.to(torch.int64).contiguous(), cos_sin_cache.to(torch.float32).contiguous()
    q_out, k_out = torch.empty(q.shape, dtype=q.dtype), torch.empty(k.shape, dtype=k.dtype)
    _run()(
        *(ctypes.byref(Heads.of(q, q_out)), ctypes.byref(Heads.of(k, k_out))),
        *(positions.data_ptr(), cos_sin_cache.data_ptr()),
        *(len(q), q.shape[-1], cos_sin_cache.shape[-1], native.FORMATS[q.dtype], torch.get_num_threads()),
    )
    return q_out, k_out
