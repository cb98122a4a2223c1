"""Rotary position embedding of queries and keys. Called by each attention layer."""

from types import ModuleType

import torch
from batchinfer.kernels.rotary import cpu, reference


def rotary(
    q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor, cos_sin_cache: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotates the first rotary_dim dimensions of each head, dimension i with i + rotary_dim / 2 (GPT-NeoX halves).

    q: [num_tokens, num_q_heads, head_dim], k: [num_tokens, num_kv_heads, head_dim], any float dtype and strides.
    positions: int64 [num_tokens], rows of the cache.
    cos_sin_cache: float32 [rows, rotary_dim], cosines then sines, rotary_dim <= head_dim.
    Returns new contiguous tensors of q's and k's dtype; computed in float32. Source: Su et al., arXiv 2104.09864.
    """
    check_rotary(q, k, positions, cos_sin_cache)
    return _backend(q, k).rotary(q, k, positions, cos_sin_cache)


def _backend(q: torch.Tensor, k: torch.Tensor) -> ModuleType:
    if q.is_cuda:
        from batchinfer.kernels.rotary import gpu  # here, as it brings Triton

        return gpu
    return cpu if cpu.can_run(q, k) else reference


def check_rotary(q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor, cos_sin_cache: torch.Tensor) -> None:
    """Raises ValueError on shapes that do not fit."""
    rotary_dim = cos_sin_cache.shape[-1]
    if rotary_dim % 2 or rotary_dim > q.shape[-1] or q.shape[-1] != k.shape[-1]:
        raise ValueError(f"rotary_dim {rotary_dim} does not fit heads of {q.shape[-1]} and {k.shape[-1]}")
    if not q.shape[0] == k.shape[0] == positions.shape[0]:
        raise ValueError(f"{len(q)} queries, {len(k)} keys, {len(positions)} positions")
