"""Writes new keys and values into the paged cache, quantising them where the cache is of 8 bits. Called by each
attention layer before paged_attention."""

from types import ModuleType

import torch
from batchinfer.kernels.common.cache_form import check_cache
from batchinfer.kernels.common.fp8 import check_scales
from batchinfer.kernels.common.key_offset import check_key_offset
from batchinfer.kernels.kv_store import cpu, reference
from batchinfer.kernels.rotary import check_rotary


def kv_store(
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
) -> None:
    """Stores token i's keys and values at slot_mapping[i]; tokens with a negative slot are skipped.

    k, v: [num_tokens, num_kv_heads, head_dim], any float dtype and strides.
    k_cache, v_cache: [num_blocks, num_kv_heads, block_size, head_dim]; bf16, fp16, fp32, float8_e4m3fn, float8_e5m2 or
        int8; contiguous, or on a CPU in contiguous blocks; written in place.
    slot_mapping: int64 [num_tokens], block * block_size + offset; non-negative slots are distinct.
    k_scale, v_scale: float32 [num_blocks, num_kv_heads, block_size], written in place: of each token and
        head, the absmax / 127 for int8; for float8 codes are of the vector over the divisor with the least squared
        error among absmax / (448 or 57344) times 2^(i / 8), i = 0 ... 7, and the scale is the factor of these codes
        with the least squared error. Or static ones, float32 [num_kv_heads] or [1], which are read: values are divided
        by them and saturate. None: as static ones of 1. int8 needs scales.

    A NaN stays NaN: in the code of a float format, and in the scale of a token (int8 with a static scale makes it 0).
    Raises ValueError on shapes that do not fit.
    """
    _check(k, v, k_cache, v_cache, slot_mapping)
    check_scales(k_cache, k_scale, v_scale)
    backend = _backend(k, v, k_cache)
    backend.kv_store(k, v, k_cache, v_cache, slot_mapping, k_scale, v_scale)


def rotary_kv_store(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    positions: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    k_offset: torch.Tensor | None = None,
    k_weight: torch.Tensor | None = None,
    token_positions: torch.Tensor | None = None,
) -> torch.Tensor:
    """`rotary` of q and k, then `kv_store` of the rotated k and v, in one pass; the bits are those of the two.

    Arguments as theirs. k_offset: float32 [num_segments, num_kv_heads, head_dim], contiguous; for a cache with a scale
        a token. Row p // SEGMENT is taken off the rotated key of a token at position p before it is scaled, so that
        what keys have in common takes no bits; paged_attention, given the same, puts it back.
    k_weight: as k_offset, what the squared error of each dimension of a key counts where its scale is chosen.
    token_positions: int64 [num_tokens], a token's place in its sequence, below SEGMENT * num_segments. With the two.
    Returns the rotated q, a new contiguous tensor. Raises ValueError on shapes that do not fit.
    """
    check_rotary(q, k, positions, cos_sin_cache)
    _check(k, v, k_cache, v_cache, slot_mapping)
    check_scales(k_cache, k_scale, v_scale)
    check_key_offset(k_offset, k_cache, k_scale)
    check_key_offset(k_weight, k_cache, k_scale, name="k_weight")
    is_by_position = k_offset is not None or k_weight is not None
    if is_by_position and (token_positions is None or token_positions.shape != slot_mapping.shape):
        raise ValueError("k_offset and k_weight need token_positions, one a token")
    backend = _backend(k, v, k_cache, has_native_form=q.dtype == k.dtype)
    return backend.rotary_kv_store(
        *(q, k, v, positions, cos_sin_cache, k_cache, v_cache, slot_mapping, k_scale, v_scale),
        *(k_offset, k_weight, token_positions),
    )


def _backend(
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    has_native_form: bool = True,
) -> ModuleType:
    if k.is_cuda:
        from batchinfer.kernels.kv_store import gpu  # here, as it brings Triton

        return gpu
    return cpu if has_native_form and cpu.can_run(k, v, k_cache) else reference


def _check(k: torch.Tensor, v: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, slots: torch.Tensor) -> None:
    check_cache(k_cache, v_cache)
    _, num_kv_heads, _, head_dim = k_cache.shape
    for values, cache in ((k, k_cache), (v, v_cache)):
        if values.shape != (slots.shape[0], num_kv_heads, head_dim):
            raise ValueError(
                f"values {tuple(values.shape)} do not fit {slots.shape[0]} slots of cache {tuple(cache.shape)}"
            )
