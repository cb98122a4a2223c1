"""Llama 2 and 3, SmolLM2 and others of model_type `llama`. Defaults as in transformers' LlamaConfig."""

from batchinfer.models.config_fields import ConfigFields
from batchinfer.models.families.common import parse_common
from batchinfer.models.spec import DecoderSpec


def parse(fields: ConfigFields) -> DecoderSpec:
    attention_bias = fields.boolean("attention_bias", False)
    return parse_common(
        fields,
        intermediate_size=11008,
        vocab_size=32000,
        max_position_embeddings=2048,
        num_kv_heads=None,
        qkv_bias=attention_bias,
        output_bias=attention_bias,
        mlp_bias=fields.boolean("mlp_bias", False),
    )
