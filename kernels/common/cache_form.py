"""The form of the paged cache that kv_store writes and paged_attention reads. Both check it by what stands here."""

import torch


def check_cache(k_cache: torch.Tensor, v_cache: torch.Tensor) -> None:
    """Raises ValueError unless both are of one shape, dtype and strides and each block is contiguous; on a GPU they are
    contiguous as a whole."""
    if v_cache.shape != k_cache.shape or v_cache.dtype != k_cache.dtype:
        raise ValueError("k_cache and v_cache must be of one shape and dtype")
    if k_cache.is_contiguous() and v_cache.is_contiguous():
        return
    _, _, tokens, size = k_cache.shape
    if k_cache.is_cuda:
        raise ValueError("k_cache and v_cache must be contiguous")
    if k_cache.stride() == v_cache.stride() and k_cache.stride()[1:] == (tokens * size, size, 1):
        return
    if not (k_cache[:1].is_contiguous() and k_cache.stride() == v_cache.stride()):  # there may be one head or token
        raise ValueError("the blocks of k_cache and v_cache must be contiguous, and equally far apart")
