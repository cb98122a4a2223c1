"""Native CPU backend of kv_store."""

import ctypes
import functools
from collections.abc import Callable
from ctypes import c_int64, c_void_p

import torch
from batchinfer.kernels.common import native
from batchinfer.kernels.common.fp8 import a_head, is_per_token
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
        *((name, c_int64) for name in ("num_tokens", "num_kv_heads", "head_dim", "block_size", "block_stride")),
        *((name, c_int64) for name in ("format", "cache_format", "scales_per_token", "threads")),
    )


class Rotation(ctypes.Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("q", "q_out", "positions", "cos_sin_cache")),
        *((name, c_void_p) for name in ("k_offset", "k_weight", "token_positions")),
        *((name, c_int64) for name in ("num_q_heads", "token_stride", "head_stride", "rotary_dim")),
    )


@functools.cache
def _run_rotary() -> Callable[..., None]:
    return native.function("kv_store", "rotary_kv_store", ctypes.POINTER(Problem), ctypes.POINTER(Rotation))


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
    k, v, slots = native.dense_rows(k), native.dense_rows(v), native.dense(slot_mapping, torch.int64)
    k_scale, v_scale = (a_head(scale, k.shape[1]) for scale in (k_scale, v_scale))
    _run()(ctypes.byref(_problem(k, v, k_cache, v_cache, slots, k_scale, v_scale)))


def rotary_kv_store(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    positions: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
    k_offset: torch.Tensor | None,
    k_weight: torch.Tensor | None,
    token_positions: torch.Tensor | None,
) -> torch.Tensor:
    """See the package's `rotary_kv_store`."""
    q, k, v = native.dense_rows(q), native.dense_rows(k), native.dense_rows(v)
    slots, positions = native.dense(slot_mapping, torch.int64), native.dense(positions, torch.int64)
    cos_sin_cache = native.dense(cos_sin_cache, torch.float32)
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    if token_positions is not None:
        token_positions = native.dense(token_positions, torch.int64)
    rotation = Rotation(
        *(q.data_ptr(), out.data_ptr(), positions.data_ptr(), cos_sin_cache.data_ptr()),
        *(address(k_offset), address(k_weight), address(token_positions)),
        *(q.shape[1], *q.stride()[:2], cos_sin_cache.shape[-1]),
    )
    k_scale, v_scale = (a_head(scale, k.shape[1]) for scale in (k_scale, v_scale))
    problem = _problem(k, v, k_cache, v_cache, slots, k_scale, v_scale)
    _run_rotary()(ctypes.byref(problem), ctypes.byref(rotation))
    return out


def _problem(
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slots: torch.Tensor,
    k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
) -> Problem:
    """Of tensors that must outlive the call."""
    return Problem(
        *(Side.of(k, k_cache, k_scale), Side.of(v, v_cache, v_scale), slots.data_ptr()),
        *(*k.shape, k_cache.shape[2], k_cache.stride(0)),
        *(native.FORMATS[k.dtype], native.FORMATS[k_cache.dtype]),
        *(is_per_token(k_scale), torch.get_num_threads()),
    )
