"""The part of the keys that is known before any text is: kv_store takes it off, so that an 8-bit cache spends none of
its few bits on it, and paged_attention puts it back. Both check and read it by what stands here."""

import torch
from batchinfer.kernels.common.fp8 import is_per_token

SEGMENT = 256  # positions that share an offset, as in key_offset.h; the tiles of attention's keys divide it


def check_key_offset(
    k_offset: torch.Tensor | None,
    k_cache: torch.Tensor,
    k_scale: torch.Tensor | None,
    num_positions: int = 0,
    name: str = "k_offset",
) -> None:
    """Raises ValueError unless k_offset is absent, or float32 [num_segments, num_kv_heads, head_dim] and contiguous,
    for a cache with a scale a token, and covers num_positions positions. name: of the argument, in the message."""
    if k_offset is None:
        return
    wanted = (k_cache.shape[1], k_cache.shape[3])
    if k_offset.dim() != 3 or k_offset.shape[1:] != wanted or k_offset.dtype != torch.float32:
        raise ValueError(f"{name} {k_offset.dtype} {tuple(k_offset.shape)}: must be float32 {('segments', *wanted)}")
    if not k_offset.is_contiguous():
        raise ValueError(f"{name} must be contiguous")
    if not is_per_token(k_scale):
        raise ValueError(f"{name} needs a cache with a scale for each token and head")
    if len(k_offset) * SEGMENT < num_positions:
        raise ValueError(f"{name} covers {len(k_offset) * SEGMENT} of {num_positions} positions")
