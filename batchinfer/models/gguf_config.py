"""GGUF metadata of the Llama family to the fields of a Hugging Face config.json and generation_config.json. Called by
models/gguf_conversion.py; a key that would change the arithmetic and is not known here is an error."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from batchinfer.errors import BatchInferError

ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}

_FIELDS = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
}
_KNOWN_KEYS = {
    *_FIELDS,
    "attention.head_count_kv",
    "attention.key_length",
    "attention.value_length",
    "rope.dimension_count",
    "rope.freq_base",
    "rope.scaling.type",
    "rope.scaling.factor",
    "rope.scaling.original_context_length",
    "rope.scaling.finetuned",  # a remark; no arithmetic
    "vocab_size",  # the embedding's own shape is used
}
_SAMPLING = {
    "general.sampling.temp": "temperature",
    "general.sampling.top_k": "top_k",
    "general.sampling.top_p": "top_p",
    "general.sampling.min_p": "min_p",
    "general.sampling.penalty_repeat": "repetition_penalty",
}
# Tokens that end an answer beside the metadata's own, where the vocabulary marks them as control tokens: what the
# models' generation_config.json lists and GGUF has no key for.
_END_TOKENS = {
    "llama-bpe": ("<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"),
    "qwen2": ("<|im_end|>", "<|endoftext|>"),
}
_LLAMA3_ROPE = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def make_config(
    metadata: Mapping[str, Any],
    tensor_shapes: Mapping[str, tuple[int, ...]],
    rope_factors: npt.NDArray[np.float32] | None,
    dtype: str,
) -> dict[str, Any]:
    """The config.json of a GGUF file.

    tensor_shapes: rows first, as Hugging Face has them. rope_factors: the tensor `rope_freqs.weight` [head_dim / 2]
    that Llama 3 files carry. dtype: a torch dtype's name, of the weights as written. Raises BatchInferError for another
    architecture, an unknown key and settings that the Llama family does not have.
    """
    architecture = metadata["general.architecture"]
    if architecture not in ARCHITECTURES:
        raise BatchInferError(f"architecture {architecture!r} is not supported; supported: {', '.join(ARCHITECTURES)}")
    values = _architecture_values(metadata, architecture)
    config: dict[str, Any] = {"architectures": [ARCHITECTURES[architecture]], "model_type": architecture}
    config |= {field: _plain(_require(values, key)) for key, field in _FIELDS.items()}
    config["num_key_value_heads"] = values.get("attention.head_count_kv", config["num_attention_heads"])
    config["head_dim"] = _head_dim(values, config)
    config["vocab_size"] = tensor_shapes["token_embd.weight"][0]
    config["tie_word_embeddings"] = "output.weight" not in tensor_shapes
    config["hidden_act"] = "silu"
    config["rope_theta"] = _plain(values.get("rope.freq_base", 10000.0))
    config["rope_scaling"] = _rope_scaling(values, config, rope_factors)
    if architecture == "llama":
        config["attention_bias"] = "blk.0.attn_q.bias" in tensor_shapes
        config["mlp_bias"] = "blk.0.ffn_up.bias" in tensor_shapes
    config["dtype"] = dtype
    return config | _token_ids(metadata)


def make_generation_config(metadata: Mapping[str, Any], control_tokens: Mapping[str, int]) -> dict[str, Any]:
    """The generation_config.json: all ids that end an answer, and the sampling defaults where the file has some."""
    ids = _token_ids(metadata)
    ends = [ids["eos_token_id"]] if "eos_token_id" in ids else []
    ends += [metadata[f"tokenizer.ggml.{key}_token_id"] for key in ("eot", "eom") if _has_token(metadata, key)]
    names = _END_TOKENS.get(metadata.get("tokenizer.ggml.pre", ""), ())
    ends += [control_tokens[name] for name in names if name in control_tokens]
    unique = list(dict.fromkeys(ends))
    if unique:
        ids["eos_token_id"] = unique if len(unique) > 1 else unique[0]
    sampling = {field: _plain(metadata[key]) for key, field in _SAMPLING.items() if key in metadata}
    return ids | sampling | ({"do_sample": True} if sampling else {})


def _architecture_values(metadata: Mapping[str, Any], architecture: str) -> dict[str, Any]:
    prefix = f"{architecture}."
    values = {key.removeprefix(prefix): value for key, value in metadata.items() if key.startswith(prefix)}
    for key, value in values.items():
        if key not in _KNOWN_KEYS:
            raise BatchInferError(f"unknown key {prefix}{key} = {value!r}: it may change the arithmetic")
        if isinstance(value, list):
            raise BatchInferError(f"key {prefix}{key} differs by layer, which is not supported")
    return values


def _require(values: Mapping[str, Any], key: str) -> Any:
    if key not in values:
        raise BatchInferError(f"the key for {key} is missing")
    return values[key]


def _head_dim(values: Mapping[str, Any], config: Mapping[str, Any]) -> int:
    default = config["hidden_size"] // config["num_attention_heads"]
    head_dim = int(values.get("attention.key_length", default))
    for key in ("attention.value_length", "rope.dimension_count"):
        if values.get(key, head_dim) != head_dim:
            raise BatchInferError(f"{key} = {values[key]} differs from the head size {head_dim}: not supported")
    return head_dim


def _rope_scaling(
    values: Mapping[str, Any], config: Mapping[str, Any], rope_factors: npt.NDArray[np.float32] | None
) -> dict[str, Any] | None:
    kind = values.get("rope.scaling.type", "none")
    if rope_factors is not None:
        if kind != "none":
            raise BatchInferError(f"rope_freqs.weight together with rope.scaling.type = {kind!r} is not supported")
        return _llama3_scaling(config, rope_factors)
    if kind == "none":
        return None
    if kind not in ("linear", "yarn"):
        raise BatchInferError(f"rope.scaling.type = {kind!r} is not supported; supported: none, linear, yarn")
    scaling = {"rope_type": kind, "factor": _plain(_require(values, "rope.scaling.factor"))}
    if kind == "yarn":
        scaling["original_max_position_embeddings"] = _require(values, "rope.scaling.original_context_length")
    return scaling


def _llama3_scaling(config: Mapping[str, Any], rope_factors: npt.NDArray[np.float32]) -> dict[str, Any] | None:
    """GGUF keeps the divisors of the frequencies, config.json the four numbers they come from (Llama 3.1's rule). All
    published models share three of them; that they give this file's divisors is checked."""
    factor = float(rope_factors.max())
    if factor == 1.0 and rope_factors.min() == 1.0:
        return None
    low, high = _LLAMA3_ROPE["low_freq_factor"], _LLAMA3_ROPE["high_freq_factor"]
    head_dim = config["head_dim"]
    wavelength = 2 * np.pi * config["rope_theta"] ** (np.arange(0, head_dim, 2) / head_dim)
    smooth = (_LLAMA3_ROPE["original_max_position_embeddings"] / wavelength - low) / (high - low)
    expected = 1 / ((1 - np.clip(smooth, 0, 1)) / factor + np.clip(smooth, 0, 1))
    if rope_factors.shape != expected.shape or not np.allclose(rope_factors, expected, rtol=1e-4):
        raise BatchInferError("rope_freqs.weight follows no known rule (Llama 3's was tried)")
    return {"rope_type": "llama3", "factor": factor, **_LLAMA3_ROPE}


def _has_token(metadata: Mapping[str, Any], key: str) -> bool:
    return f"tokenizer.ggml.{key}_token_id" in metadata


def _token_ids(metadata: Mapping[str, Any]) -> dict[str, Any]:
    names = {"bos": "bos_token_id", "eos": "eos_token_id", "padding": "pad_token_id"}
    return {
        field: metadata[f"tokenizer.ggml.{key}_token_id"] for key, field in names.items() if _has_token(metadata, key)
    }


def _plain(value: Any) -> Any:
    """GGUF keeps float32: 1e-5 comes back as 9.999999747378752e-06. The shortest decimal is what was written."""
    return float(str(np.float32(value))) if isinstance(value, float) else value
