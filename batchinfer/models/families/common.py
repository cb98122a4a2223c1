"""What the Llama-like families share: the names of sizes in config.json and of tensors in the checkpoint."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

from batchinfer.models.config_fields import ConfigFields
from batchinfer.models.rope_config import parse_rope
from batchinfer.models.spec import Activation, DecoderSpec

ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
}
DTYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}


@dataclass(frozen=True, slots=True)
class WeightNames:
    """Tensor names in the checkpoint; those below `final_norm` follow `layer.format(i)`, some with a suffix."""

    embedding: str = "model.embed_tokens.weight"
    lm_head: str = "lm_head.weight"
    final_norm: str = "model.norm.weight"
    layer: str = "model.layers.{}."
    input_norm: str = "input_layernorm.weight"
    post_attention_norm: str = "post_attention_layernorm.weight"
    qkv: tuple[str, str, str] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    attention_output: str = "self_attn.o_proj"
    q_norm: str = "self_attn.q_norm.weight"
    k_norm: str = "self_attn.k_norm.weight"
    gate_up: tuple[str, str] = ("mlp.gate_proj", "mlp.up_proj")
    down: str = "mlp.down_proj"
    derived: str = ".rotary_emb.inv_freq"  # names ending so hold what the config says already


def parse_common(
    fields: ConfigFields,
    *,
    intermediate_size: int,
    vocab_size: int,
    max_position_embeddings: int,
    num_kv_heads: int | None,
    head_dim: int | None = None,
    qkv_bias: bool = False,
    output_bias: bool = False,
    mlp_bias: bool = False,
    qk_norm: bool = False,
    window_of_layer: Callable[[int], int | None] = lambda layer: None,
) -> DecoderSpec:
    """The sizes given are the family's defaults for absent fields. num_kv_heads None: as many as query heads.
    head_dim None: hidden_size / num_q_heads. Raises BatchInferError on values that cannot be."""
    hidden_size = fields.integer("hidden_size", 4096)
    num_layers = fields.integer("num_hidden_layers", 32)
    num_q_heads = fields.integer("num_attention_heads", 32)
    head_dim = fields.integer("head_dim", head_dim or hidden_size // num_q_heads)
    max_positions = fields.integer("max_position_embeddings", max_position_embeddings)
    try:
        return DecoderSpec(
            family=str(fields.raw("model_type")),
            vocab_size=fields.integer("vocab_size", vocab_size),
            hidden_size=hidden_size,
            intermediate_size=fields.integer("intermediate_size", intermediate_size),
            num_layers=num_layers,
            num_q_heads=num_q_heads,
            num_kv_heads=fields.optional_integer("num_key_value_heads", num_kv_heads) or num_q_heads,
            head_dim=head_dim,
            max_position_embeddings=max_positions,
            activation=_activation(fields),
            rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
            qkv_bias=qkv_bias,
            output_bias=output_bias,
            mlp_bias=mlp_bias,
            qk_norm=qk_norm,
            tie_word_embeddings=fields.boolean("tie_word_embeddings", False),
            sliding_windows=tuple(window_of_layer(layer) for layer in range(num_layers)),
            rope=parse_rope(fields, head_dim, max_positions),
            dtype=_dtype(fields),
        )
    except ValueError as error:
        raise fields.invalid(str(error)) from error


def _activation(fields: ConfigFields) -> Activation:
    name = fields.raw("hidden_act", "silu")
    if name not in ACTIVATIONS:
        raise fields.error("hidden_act", f"must be one of {', '.join(ACTIVATIONS)}")
    return cast(Activation, ACTIVATIONS[name])


def _dtype(fields: ConfigFields) -> str | None:
    """transformers 5 writes `dtype`, transformers 4 `torch_dtype`."""
    old = fields.raw("torch_dtype")
    name = fields.raw("dtype") or old
    if name is not None and name not in DTYPES:
        raise fields.error("dtype" if fields.raw("dtype") else "torch_dtype", f"must be one of {', '.join(DTYPES)}")
    return None if name is None else DTYPES[name]
