"""Reads the rotary embedding out of config.json, as written by transformers 4 (`rope_theta`, `rope_scaling`) and by
transformers 5 (`rope_parameters`). Called by families/; an unknown kind or parameter is an error, never ignored."""

import math
from collections.abc import Mapping
from typing import Any, cast

from batchinfer.errors import BatchInferError
from batchinfer.models.config_fields import ConfigFields
from batchinfer.models.spec import RopeKind, RopeSpec

_ANY_KIND = {"rope_type", "type", "rope_theta", "partial_rotary_factor"}
_KNOWN = {
    "default": set[str](),
    "linear": {"factor"},
    "dynamic": {"factor"},
    "proportional": {"factor"},
    "llama3": {"factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"},
    "longrope": {"factor", "original_max_position_embeddings", "attention_factor", "short_factor", "long_factor"},
    "yarn": {
        *("factor", "original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow"),
        *("mscale", "mscale_all_dim", "truncate"),
    },
}


class _Parameters:
    """The rotary parameters of one config.json, by name."""

    def __init__(self, fields: ConfigFields) -> None:
        scaling, parameters = fields.raw("rope_scaling"), fields.raw("rope_parameters")
        self.name = "rope_scaling" if scaling else "rope_parameters"
        values = scaling or parameters or {}
        if not isinstance(values, Mapping):
            raise fields.error(self.name, "must be an object")
        self.values: Mapping[str, Any] = values
        self.where = fields.where
        self.allowed = fields.allowed

    def kind(self) -> str:
        kind = self.values.get("rope_type", self.values.get("type", "default"))
        if any(isinstance(value, Mapping) for value in self.values.values()):
            raise self.error("rope_type", "parameters by layer type are not known for this model")
        if kind not in _KNOWN:
            raise self.error("rope_type", f"{kind!r} is not one of {', '.join(_KNOWN)}")
        for name, value in self.values.items():
            known = name in _ANY_KIND | _KNOWN[kind] or f"{self.name}.{name}" in self.allowed
            if value is not None and not known:
                raise self.error(
                    name,
                    f"is not a parameter of {kind}; if it is harmless, pass --allow-config-fields {self.name}.{name}",
                )
        return str(kind)

    def number(self, name: str, default: float | None = None) -> float:
        value = self.values.get(name)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
            raise self.error(name, f"must be a number above 0, not {value!r}")
        return value

    def numbers(self, name: str, length: int) -> tuple[float, ...]:
        value = self.values.get(name)
        if not isinstance(value, list) or len(value) != length or not all(isinstance(v, int | float) for v in value):
            raise self.error(name, f"must be a list of {length} numbers")
        return tuple(float(v) for v in value)

    def error(self, name: str, problem: str) -> BatchInferError:
        return BatchInferError(f"{self.where}: {self.name}.{name}: {problem}")


def parse_rope(fields: ConfigFields, head_dim: int, max_position_embeddings: int) -> RopeSpec:
    """Sources of the kinds: transformers' modeling_rope_utils, whose parameter names and defaults these are.

    `partial_rotary_factor` rotates the first part of each head. (transformers' own Llama code ignores it for the
    default kind and fails on it for the others; models that have it mean it.)
    """
    parameters = _Parameters(fields)
    kind = parameters.kind()
    theta = parameters.number("rope_theta", fields.number("rope_theta", 10000.0))
    fraction = parameters.number("partial_rotary_factor", fields.number("partial_rotary_factor", 1.0))
    original = fields.raw("original_max_position_embeddings")
    if original is None:
        original = parameters.number("original_max_position_embeddings", max_position_embeddings)
    rotary_dim = head_dim if kind == "proportional" else int(head_dim * fraction)
    common: dict[str, Any] = {
        "kind": cast(RopeKind, kind),
        "theta": float(theta),
        "rotary_dim": rotary_dim,
        "max_position_embeddings": max_position_embeddings,
    }
    if kind == "default":
        return RopeSpec(**common)
    if kind == "proportional":
        return RopeSpec(**common, factor=parameters.number("factor", 1.0), rotated_fraction=fraction)
    if kind in ("linear", "dynamic"):
        if kind == "dynamic" and rotary_dim <= 2:
            raise parameters.error("rope_type", "dynamic needs more than 2 rotated dimensions")
        return RopeSpec(**common, factor=parameters.number("factor"))
    common["original_max_position_embeddings"] = int(original)
    if kind == "llama3":
        return _llama3(common, parameters)
    common["factor"] = parameters.number("factor", max_position_embeddings / int(original))
    return _longrope(common, parameters) if kind == "longrope" else _yarn(common, parameters)


def _llama3(common: dict[str, Any], parameters: _Parameters) -> RopeSpec:
    low, high = parameters.number("low_freq_factor"), parameters.number("high_freq_factor")
    if high <= low:
        raise parameters.error("high_freq_factor", f"must be above low_freq_factor ({low}), not {high}")
    return RopeSpec(**common, factor=parameters.number("factor"), low_freq_factor=low, high_freq_factor=high)


def _longrope(common: dict[str, Any], parameters: _Parameters) -> RopeSpec:
    factor, original = common["factor"], common["original_max_position_embeddings"]
    attention_factor = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    return RopeSpec(
        **common,
        attention_factor=parameters.number("attention_factor", attention_factor),
        short_factor=parameters.numbers("short_factor", common["rotary_dim"] // 2),
        long_factor=parameters.numbers("long_factor", common["rotary_dim"] // 2),
    )


def _yarn(common: dict[str, Any], parameters: _Parameters) -> RopeSpec:
    def mscale(weight: float) -> float:
        return 1.0 if common["factor"] <= 1 else 0.1 * weight * math.log(common["factor"]) + 1.0

    own, all_dim = parameters.values.get("mscale"), parameters.values.get("mscale_all_dim")
    attention_factor = mscale(own) / mscale(all_dim) if own and all_dim else mscale(1.0)
    truncate = parameters.values.get("truncate")
    return RopeSpec(
        **common,
        attention_factor=parameters.number("attention_factor", attention_factor),
        beta_fast=parameters.number("beta_fast", 32.0),
        beta_slow=parameters.number("beta_slow", 1.0),
        truncate=True if truncate is None else bool(truncate),
    )
