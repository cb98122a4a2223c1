"""Mistral, with its sliding window. Defaults as in transformers' MistralConfig."""

from batchinfer.models.config_fields import ConfigFields
from batchinfer.models.families.common import parse_common
from batchinfer.models.spec import DecoderSpec


def parse(fields: ConfigFields) -> DecoderSpec:
    window = fields.optional_integer("sliding_window", 4096)  # an explicit null turns it off
    return parse_common(
        fields,
        intermediate_size=14336,
        vocab_size=32000,
        max_position_embeddings=131072,
        num_kv_heads=8,
        window_of_layer=lambda layer: window,
    )
