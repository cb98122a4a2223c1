"""The scales of keys and values that some checkpoints bring for an 8-bit KV cache. Called by models/weights, layer by
layer.

Names: vLLM, model_loader/weight_utils.py (maybe_remap_kv_scale_name). A stored number is the scale times the key or
value: x = stored * scale.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from batchinfer.errors import BatchInferError
from batchinfer.quantization.tensors import TensorSource

# Of the keys' scale under a layer's self_attn; the values' has v in place of k.
_PLACES = ("k_scale", "attn.k_scale", "k_proj.k_scale", "qkv_proj.k_scale", "k_cache.scale", "k_proj.output_scale")
_SHARED = "kv_scale"  # older: one for both
# Queries and probabilities are never stored in 8 bits here.
_WITHOUT_BEARING = (
    *("q_scale", "attn.q_scale", "q_proj.q_scale", "qkv_proj.q_scale", "prob_scale", "attn.prob_scale"),
    "q_zero_point",
)
_ZERO_POINTS = ("k_zero_point", "v_zero_point")
# Dtypes of the cache (config.KV_CACHE_DTYPES) whose range the scales were found for.
_CACHE_DTYPES = {"float": ("fp8", "fp8_e5m2"), "int": ("int8",)}


@dataclass(frozen=True, slots=True)
class KVScales:
    """Of one layer: float32 [1] for the layer, or [num_kv_heads]."""

    key: Tensor
    value: Tensor


def cache_dtypes(config: Mapping[str, Any]) -> tuple[str, ...]:
    """The cache dtypes that a checkpoint's KV scales fit. config: its quantisation config, or an empty one.

    Scales for e4m3 map the largest magnitude to 448, which e5m2 holds as well and int8 does not; those for int8 map it
    to 127.
    """
    scheme = config.get("kv_cache_scheme")
    if not isinstance(scheme, Mapping):
        return _CACHE_DTYPES["float"]
    if scheme.get("num_bits", 8) != 8 or scheme.get("symmetric") is False:
        return ()
    return _CACHE_DTYPES.get(scheme.get("type", "float"), ())


def has_kv_scales(names: Iterable[str]) -> bool:
    """Whether one of a checkpoint's tensors is a scale of keys, or of keys and values, by its name."""
    suffixes = tuple(f".self_attn.{place}" for place in (*_PLACES, _SHARED))
    return any(name.endswith(suffixes) for name in names)


def take_kv_scales(
    source: TensorSource, prefix: str, unused: set[str], num_kv_heads: int, device: torch.device
) -> KVScales | None:
    """The scales of the layer whose names begin with `prefix`, ticked off in `unused`; None where it has none.

    Raises BatchInferError where there is but one of the two, a scale that is no positive number, or a zero point that
    is not 0.
    """
    attention = f"{prefix}self_attn."
    unused.difference_update(attention + name for name in _WITHOUT_BEARING)
    _drop_zero_points(source, [attention + name for name in _ZERO_POINTS], unused)
    key = _take(source, _names(attention, "k"), unused, num_kv_heads)
    value = _take(source, _names(attention, "v"), unused, num_kv_heads)
    shared = _take(source, [attention + _SHARED], unused, num_kv_heads)
    key, value = (shared if own is None else own for own in (key, value))
    if (key is None) != (value is None):
        raise BatchInferError(f"{source.where}: layer {attention.rstrip('.')} has a scale for keys or values only")
    return None if key is None or value is None else KVScales(key.to(device), value.to(device))


def are_usable(layers: Sequence[KVScales | None], where: str) -> bool:
    """Whether a model's layers have scales. They have none where all are 1.0, as exporters write them that measured
    nothing: a scale for each token is then the safe choice. Raises BatchInferError where some layers have none."""
    found = [scales for scales in layers if scales is not None]
    if found and len(found) < len(layers):
        raise BatchInferError(f"{where}: layer {list(layers).index(None)} has no KV scales, but others have")
    return any(bool((part != 1).any()) for scales in found for part in (scales.key, scales.value))


def _drop_zero_points(source: TensorSource, names: Sequence[str], unused: set[str]) -> None:
    """Exporters write zeros where scales are symmetric; the caches here have no place for others."""
    for name in names:
        if name in unused:
            unused.discard(name)
            if bool((zero := source.read(name).to(torch.float32)).count_nonzero()):
                raise BatchInferError(
                    f"{source.where}: {name} is {zero.flatten().tolist()}, not 0: keys and values that are stored "
                    "about a zero point are not read; calibrate the checkpoint with symmetric KV scales"
                )


def _names(attention: str, part: str) -> list[str]:
    return [attention + place.replace("k_", f"{part}_") for place in _PLACES]


def _take(source: TensorSource, names: list[str], unused: set[str], num_kv_heads: int) -> Tensor | None:
    found = [name for name in names if name in unused]
    if not found:
        return None
    if len(found) > 1:
        raise BatchInferError(f"{source.where}: {found[0]} and {found[1]} are both there; one of them must go")
    unused.discard(found[0])
    tensor = source.read(found[0])
    if tensor.numel() not in (1, num_kv_heads) or not tensor.is_floating_point():
        raise BatchInferError(
            f"{source.where}: {found[0]} is {tensor.dtype} {list(tensor.shape)}, not a float, nor one for each of "
            f"{num_kv_heads} heads"
        )
    scale = tensor.to(torch.float32).flatten()
    if not bool((scale > 0).all()) or not bool(scale.isfinite().all()):
        raise BatchInferError(f"{source.where}: {found[0]} is {scale.tolist()}, not above 0: the scales are broken")
    return scale
