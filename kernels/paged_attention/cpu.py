"""Native CPU backend of paged_attention."""

import ctypes
import functools
from collections.abc import Callable

import torch
from batchinfer.kernels.common import native
from batchinfer.kernels.common.native import address


class Problem(ctypes.Structure):
    """As in attention.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("q", "out", "k_cache", "v_cache", "k_scale", "v_scale")),
        *((name, ctypes.c_void_p) for name in ("block_table", "cu_seqlens_q", "seq_lens")),
        *((name, ctypes.c_int64) for name in ("q_token_stride", "q_head_stride")),
        *((name, ctypes.c_int64) for name in ("num_seqs", "max_blocks", "num_q_heads", "num_kv_heads")),
        *((name, ctypes.c_int64) for name in ("head_dim", "block_size", "q_format", "cache_format")),
        *((name, ctypes.c_int64) for name in ("sliding_window", "threads")),
        ("scale", ctypes.c_double),
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
    scale: float,
    k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
    sliding_window: int | None,
) -> torch.Tensor:
    """See the package's `paged_attention`."""
    q = native.dense_rows(q)
    block_table, cu_seqlens_q, seq_lens = (
        tensor.to(torch.int32).contiguous() for tensor in (block_table, cu_seqlens_q, seq_lens)
    )
    out = torch.empty(q.shape, dtype=q.dtype)
    _, num_q_heads, head_dim = q.shape
    _, num_kv_heads, block_size, _ = k_cache.shape
    num_seqs, max_blocks = block_table.shape
    problem = Problem(
        *map(address, (q, out, k_cache, v_cache, k_scale, v_scale, block_table, cu_seqlens_q, seq_lens)),
        *q.stride()[:2],
        *(num_seqs, max_blocks, num_q_heads, num_kv_heads, head_dim, block_size),
        *(native.FORMATS[q.dtype], native.FORMATS[k_cache.dtype]),
        *(sliding_window or 0, torch.get_num_threads()),
        scale,
    )
    _run()(ctypes.byref(problem))
    return out
