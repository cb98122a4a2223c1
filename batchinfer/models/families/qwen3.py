"""Qwen3 (dense), which normalises each head of queries and keys. Defaults as in transformers' Qwen3Config."""

from batchinfer.models.config_fields import ConfigFields
from batchinfer.models.families.common import parse_common
from batchinfer.models.families.qwen2 import window_of_layer
from batchinfer.models.spec import DecoderSpec


def parse(fields: ConfigFields) -> DecoderSpec:
    attention_bias = fields.boolean("attention_bias", False)
    return parse_common(
        fields,
        intermediate_size=22016,
        vocab_size=151936,
        max_position_embeddings=32768,
        num_kv_heads=32,
        head_dim=128,
        qkv_bias=attention_bias,
        output_bias=attention_bias,
        qk_norm=True,
        window_of_layer=window_of_layer(fields),
    )
