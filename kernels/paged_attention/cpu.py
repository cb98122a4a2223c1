"""Native CPU backend of paged_attention."""

import ctypes
import functools
from collections.abc import Callable

import torch
from batchinfer.kernels.common import native
from batchinfer.kernels.common.fp8 import a_head, is_per_token
from batchinfer.kernels.common.native import address
from batchinfer.kernels.paged_attention.variant import Variant


class Problem(ctypes.Structure):
    """As in attention.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("q", "out", "k_cache", "v_cache", "k_scale", "v_scale", "sinks")),
        ("k_offset", ctypes.c_void_p),
        *((name, ctypes.c_void_p) for name in ("block_table", "cu_seqlens_q", "seq_lens")),
        *((name, ctypes.c_int64) for name in ("q_token_stride", "q_head_stride", "block_stride")),
        *((name, ctypes.c_int64) for name in ("num_seqs", "max_blocks", "num_q_heads", "num_kv_heads")),
        *((name, ctypes.c_int64) for name in ("head_dim", "block_size", "q_format", "cache_format")),
        *((name, ctypes.c_int64) for name in ("scales_per_token", "sliding_window", "threads")),
        *((name, ctypes.c_double) for name in ("scale", "soft_cap")),
    )


@functools.cache
def _run() -> Callable[..., None]:
    return native.function("paged_attention", "paged_attention", ctypes.POINTER(Problem))


def can_run(q: torch.Tensor, k_cache: torch.Tensor) -> bool:
    return k_cache.is_cpu and k_cache.dtype in native.FORMATS and native.can_run("paged_attention", q)


def paged_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    seq_lens: torch.Tensor,
    k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
    variant: Variant,
) -> torch.Tensor:
    """See the package's `paged_attention`."""
    q = native.dense_rows(q)
    block_table, seq_lens = native.dense(block_table, torch.int32), native.dense(seq_lens, torch.int32)
    cu_seqlens_q = native.dense(cu_seqlens_q, torch.int32)
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    _, num_q_heads, head_dim = q.shape
    _, num_kv_heads, block_size, _ = k_cache.shape
    num_seqs, max_blocks = block_table.shape
    k_scale, v_scale = a_head(k_scale, num_kv_heads), a_head(v_scale, num_kv_heads)
    sinks = None if variant.sinks is None else variant.sinks.contiguous()
    problem = Problem(
        *(q.data_ptr(), out.data_ptr(), k_cache.data_ptr(), v_cache.data_ptr()),
        *(address(k_scale), address(v_scale), address(sinks), address(variant.k_offset)),
        *(block_table.data_ptr(), cu_seqlens_q.data_ptr(), seq_lens.data_ptr()),
        *(*q.stride()[:2], k_cache.stride(0) * k_cache.itemsize),
        *(num_seqs, max_blocks, num_q_heads, num_kv_heads, head_dim, block_size),
        *(native.FORMATS[q.dtype], native.FORMATS[k_cache.dtype]),
        *(is_per_token(k_scale), variant.sliding_window or 0, torch.get_num_threads()),
        *(variant.scale, variant.soft_cap or 0.0),
    )
    _run()(ctypes.byref(problem))
    return out
