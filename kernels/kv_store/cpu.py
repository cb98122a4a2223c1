"""Native CPU backend of kv_store."""

import ctypes
import functools
from collections.abc import Callable
from ctypes import c_int64, c_void_p

import torch
from batchinfer.kernels.common import native
from batchinfer.kernels.common.native import address


class Side(ctypes.Structure):
    """As in cpu.cpp, like the structures below."""

    _fields_ = (
        *((name, c_void_p) for name in ("values", "cache", "scale")),
        *((name, c_int64) for name in ("token_stride", "head_stride")),
    )

    @classmethod
    def of(cls, values: torch.Tensor, cache: torch.Tensor, scale: torch.Tensor | None) -> "Side":
        return cls(values.data_ptr(), cache.data_ptr(), address(scale), *values.stride()[:2])


class Problem(ctypes.Structure):
    _fields_ = (
        ("k", Side),
        ("v", Side),
        ("slots", c_void_p),
        *((name, c_int64) for name in ("num_tokens", "num_kv_heads", "head_dim", "block_size")),
        *((name, c_int64) for name in ("format", "cache_format", "threads")),
    )


@functools.cache
def _run() -> Callable[..., None]:
    return native.function("kv_store", "kv_store", ctypes.POINTER(Problem))


def can_run(k: torch.Tensor, v: torch.Tensor, k_cache: torch.Tensor) -> bool:
    return k_cache.is_cpu and k_cache.dtype in native.FORMATS and native.can_run("kv_store", k, v)


def kv_store(
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
) -> None:
    """See the package's `kv_store`."""
    k, v, slots = native.dense_rows(k), native.dense_rows(v), slot_mapping.to(torch.int64).contiguous()
    problem = Problem(
        *(Side.of(k, k_cache, k_scale), Side.of(v, v_cache, v_scale), slots.data_ptr()),
        *(*k.shape, k_cache.shape[2]),
        *(native.FORMATS[k.dtype], native.FORMATS[k_cache.dtype], torch.get_num_threads()),
    )
    _run()(ctypes.byref(problem))
