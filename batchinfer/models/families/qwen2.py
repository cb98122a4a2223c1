"""Qwen2 and Qwen2.5, whose queries, keys and values have biases. Defaults as in transformers' Qwen2Config."""

from collections.abc import Callable

from batchinfer.models.config_fields import ConfigFields
from batchinfer.models.families.common import parse_common
from batchinfer.models.spec import DecoderSpec


def parse(fields: ConfigFields) -> DecoderSpec:
    return parse_common(
        fields,
        intermediate_size=22016,
        vocab_size=151936,
        max_position_embeddings=32768,
        num_kv_heads=32,
        qkv_bias=True,
        window_of_layer=window_of_layer(fields),
    )


def window_of_layer(fields: ConfigFields) -> Callable[[int], int | None]:
    """The sliding window of each layer, in Qwen's terms: `layer_types`, or the layers from `max_window_layers` on."""
    window = fields.optional_integer("sliding_window", 4096)
    if not fields.boolean("use_sliding_window", False):
        window = None
    first = fields.integer("max_window_layers", 28)
    layer_types = fields.raw("layer_types")
    if layer_types is None:
        return lambda layer: window if layer >= first else None
    if not isinstance(layer_types, list) or set(layer_types) - {"full_attention", "sliding_attention"}:
        raise fields.error("layer_types", "must list full_attention and sliding_attention")
    if len(layer_types) != fields.integer("num_hidden_layers", 32):
        raise fields.error("layer_types", "must have an entry for each layer")
    return lambda layer: window if layer_types[layer] == "sliding_attention" else None
