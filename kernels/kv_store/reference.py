"""Plain torch specification of kv_store."""

import torch
from batchinfer.kernels.common.fp8 import STORAGE_MAX, encode, is_per_token
from batchinfer.kernels.common.key_offset import SEGMENT
from batchinfer.kernels.rotary import reference as rotary_reference

_LEAST_SCALE = torch.finfo(torch.float32).tiny
SCALE_STEPS = tuple(2 ** (i / 8) for i in range(8))  # as in cpu.cpp


def kv_store(
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
    k_weight: torch.Tensor | None = None,
) -> None:
    """See the package's `kv_store`. k_weight: [num_tokens, num_kv_heads, head_dim]."""
    keep = slot_mapping >= 0
    if not bool(keep.all()):
        k, v, slot_mapping = k[keep], v[keep], slot_mapping[keep]
        k_weight = None if k_weight is None else k_weight[keep]
    _, num_kv_heads, block_size, _ = k_cache.shape
    slots = slot_mapping.to(torch.int64)[:, None]
    places = (slots // block_size, torch.arange(num_kv_heads, device=k.device), slots % block_size)
    _store(k, k_cache, k_scale, places, k_weight)
    _store(v, v_cache, v_scale, places)


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
    q, k = rotary_reference.rotary(q, k, positions, cos_sin_cache)
    if k_offset is not None:
        assert token_positions is not None
        k = k.to(torch.float32) - k_offset[token_positions // SEGMENT]
    if k_weight is not None:
        assert token_positions is not None
        k_weight = k_weight[token_positions // SEGMENT]
    kv_store(k, v, k_cache, v_cache, slot_mapping, k_scale, v_scale, k_weight)
    return q


def _store(
    values: torch.Tensor,
    cache: torch.Tensor,
    scale: torch.Tensor | None,
    places: tuple[torch.Tensor, ...],
    weight: torch.Tensor | None = None,
) -> None:
    """places: block, head and place in the block, which together are [num_tokens, num_kv_heads]. weight: of the values'
    squared errors, in their shape."""
    if cache.dtype in STORAGE_MAX:
        values = values.to(torch.float32)
        if scale is not None:
            divisor = scale
            if is_per_token(scale):
                divisor = _divisor(values, cache.dtype, weight)
            values = values / divisor[..., None]
            if is_per_token(scale):
                scale[places] = _fitted(divisor, values, cache.dtype, weight)
        values = encode(values, cache.dtype)
    else:
        values = values.to(cache.dtype)
    _as_integers(cache)[places] = _as_integers(values)


def _divisor(values: torch.Tensor, dtype: torch.dtype, weight: torch.Tensor | None) -> torch.Tensor:
    """[num_tokens, num_kv_heads], what vectors are divided by: absmax / the dtype's largest value for int8; for a float
    format, whose steps grow with the value, the one with the least squared error among SCALE_STEPS times that.

    NaN where a vector holds NaN, so that the fault survives the encoding. A vector of zeros gets the least positive
    scale, which decodes to zeros.
    """
    least = (values.abs().amax(-1) / STORAGE_MAX[dtype]).clamp_min(_LEAST_SCALE)
    if dtype == torch.int8:
        return least
    best, best_error = least, torch.full_like(least, torch.inf)
    for step in SCALE_STEPS:
        scaled = values * (1 / (least * step))[..., None]
        error = (scaled - encode(scaled, dtype).to(torch.float32)).square()
        error = (error if weight is None else error * weight).sum(-1) * (step * step)
        better = error < best_error
        best, best_error = torch.where(better, least * step, best), torch.where(better, error, best_error)
    return best


def _fitted(
    divisor: torch.Tensor, divided: torch.Tensor, dtype: torch.dtype, weight: torch.Tensor | None
) -> torch.Tensor:
    """The scale of float codes by least squares: what is lost in rounding is not at right angles to the codes."""
    if dtype == torch.int8:
        return divisor
    codes = encode(divided, dtype).to(torch.float32)
    weighted = codes if weight is None else codes * weight
    ratio = (weighted * divided).sum(-1) / (weighted * codes).sum(-1)
    return torch.where(ratio > 0, divisor * ratio, divisor)  # zeros and NaN have no ratio


def _as_integers(tensor: torch.Tensor) -> torch.Tensor:
    """torch has few operations on float8; moving bytes needs none of them."""
    return tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor
