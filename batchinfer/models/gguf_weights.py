"""The tensors of a GGUF file to one safetensors file under Hugging Face names, a few rows at a time, dequantised or in
their own blocks. Called by models/gguf_conversion.py."""

import os
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np
import numpy.typing as npt

from batchinfer.errors import BatchInferError
from batchinfer.models.safetensors_header import dtype_name, header

if TYPE_CHECKING:
    import torch
    from gguf import ReaderTensor

_TOP_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_LAYER_TENSOR = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
_CHUNK_ELEMENTS = 1 << 22  # 16 MiB as float32
_FLOATS = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


def tensor_shape(tensor: "ReaderTensor") -> tuple[int, ...]:
    """Rows first, as torch has it; GGUF keeps the sizes the other way round."""
    return tuple(int(size) for size in reversed(tensor.shape))


def stored_dtype(tensors: Mapping[str, "ReaderTensor"]) -> str:
    """The dtype to write, by the type of the matrices: what floats they are, or bfloat16 where they are quantised."""
    kinds = {tensor.tensor_type.name for tensor in tensors.values() if len(tensor.shape) > 1}
    return {frozenset({"F32"}): "float32", frozenset({"F16"}): "float16"}.get(frozenset(kinds), "bfloat16")


def quantized_types(tensors: Mapping[str, "ReaderTensor"]) -> dict[str, str]:
    """The block type of each layer whose weight is quantised, the embedding included, by its Hugging Face name. Raises
    BatchInferError for a type that cannot be run as it is."""
    from batchinfer.quantization.read_gguf import BLOCK_TYPES

    types = {}
    for name, tensor in tensors.items():
        kind = tensor.tensor_type.name
        if kind in _FLOATS:
            continue
        if kind not in BLOCK_TYPES:
            raise BatchInferError(
                f"tensor {name}: type {kind} does not run as it is ({', '.join(BLOCK_TYPES)} do); "
                "leave --quantization gguf out to run it in 16 bits"
            )
        types[huggingface_name(name).removesuffix(".weight")] = kind
    return types


def write_weights(
    tensors: Mapping[str, "ReaderTensor"], config: Mapping[str, Any], path: Path, packed: Collection[str] = ()
) -> None:
    """Every tensor into one safetensors file, dequantised; memory stays at one chunk whatever the model's size.

    packed: layers whose blocks are written as they are; with any, floats keep their type as well. Raises
    BatchInferError where a tensor is missing or has no place in the model.
    """
    import torch

    places = {huggingface_name(name): tensor for name, tensor in tensors.items()}
    _check_complete(places.keys(), config)
    if packed:
        plans = [_packed_plan(name, tensor, name.removesuffix(".weight") in packed) for name, tensor in places.items()]
    else:
        dtype = getattr(torch, config["dtype"])
        plans = [_Plan(name, tensor_shape(tensor), dtype) for name, tensor in places.items()]
    with open(path, "wb") as file:
        file.write(header((plan.name, dtype_name(plan.dtype), plan.shape) for plan in plans))
        for (name, tensor), plan in zip(places.items(), plans, strict=True):
            for rows in _row_chunks(tensor, _row_order(name, config)):
                chunk = rows if plan.dtype == torch.uint8 else _dequantize(rows, tensor)
                _write_tensor(file, torch.from_numpy(chunk).to(plan.dtype))
        file.flush()
        os.fsync(file.fileno())


@dataclass(frozen=True, slots=True)
class _Plan:
    """A tensor of the file to be written."""

    name: str
    shape: tuple[int, ...]
    dtype: "torch.dtype"


def _packed_plan(name: str, tensor: "ReaderTensor", has_blocks: bool) -> _Plan:
    import torch

    from batchinfer.quantization.read_gguf import BLOCKS

    if not has_blocks:
        return _Plan(name, tensor_shape(tensor), getattr(torch, _FLOATS[tensor.tensor_type.name]))
    return _Plan(f"{name.removesuffix('.weight')}.{BLOCKS}", tuple(tensor.data.shape), torch.uint8)


def huggingface_name(name: str) -> str:
    """`blk.3.attn_q.weight` -> `model.layers.3.self_attn.q_proj.weight`. Raises BatchInferError for an unknown name."""
    if (match := _LAYER_TENSOR.fullmatch(name)) and match[2] in _LAYER_NAMES:
        return f"model.layers.{match[1]}.{_LAYER_NAMES[match[2]]}.{match[3]}"
    stem, _, kind = name.rpartition(".")
    if stem in _TOP_NAMES and kind == "weight":
        return f"{_TOP_NAMES[stem]}.weight"
    raise BatchInferError(f"tensor {name} has no place in a model of the Llama family")


def _check_complete(names: Collection[str], config: Mapping[str, Any]) -> None:
    expected = _expected_names(config)
    if missing := sorted(expected - set(names)):
        raise BatchInferError(f"{len(missing)} tensors are missing, the first is {missing[0]}")
    if surplus := sorted(set(names) - expected):
        raise BatchInferError(f"{len(surplus)} tensors are too many, the first is {surplus[0]}")


def _expected_names(config: Mapping[str, Any]) -> set[str]:
    has_head_norms = config["model_type"] == "qwen3"
    parts = [part for key, part in _LAYER_NAMES.items() if has_head_norms or key not in ("attn_q_norm", "attn_k_norm")]
    suffixes = [f"{part}.weight" for part in parts]
    if config["model_type"] == "qwen2":
        suffixes += [f"self_attn.{part}_proj.bias" for part in "qkv"]
    if config.get("attention_bias"):
        suffixes += [f"self_attn.{part}_proj.bias" for part in "qkvo"]
    if config.get("mlp_bias"):
        suffixes += [f"mlp.{part}_proj.bias" for part in ("gate", "up", "down")]
    names = {f"model.layers.{layer}.{suffix}" for layer in range(config["num_hidden_layers"]) for suffix in suffixes}
    names |= {"model.embed_tokens.weight", "model.norm.weight"}
    return names if config["tie_word_embeddings"] else names | {"lm_head.weight"}


def _row_order(name: str, config: Mapping[str, Any]) -> npt.NDArray[np.int64] | None:
    """The order that puts the rows of q and k back in halves. llama.cpp rotates neighbouring pairs in the architecture
    "llama" and stores the rows of each head so; Hugging Face rotates dimension i with i + head_dim / 2."""
    if config["model_type"] != "llama":
        return None
    for part, heads in (("q_proj", config["num_attention_heads"]), ("k_proj", config["num_key_value_heads"])):
        if f".self_attn.{part}." in name:
            rows = np.arange(heads * config["head_dim"]).reshape(heads, config["head_dim"] // 2, 2)
            return rows.swapaxes(1, 2).ravel()
    return None


def _row_chunks(tensor: "ReaderTensor", row_order: npt.NDArray[np.int64] | None) -> Iterator[npt.NDArray[Any]]:
    """The tensor as it is stored, a number of rows at a time, in their order: rows are quantised apart from each other,
    so that this needs no dequantising."""
    data = tensor.data  # [rows, elements or bytes of a row]; a vector has its elements as rows
    step = max(1, _CHUNK_ELEMENTS // (tensor_shape(tensor)[-1] if data.ndim > 1 else 1))
    if row_order is not None and len(row_order) != len(data):
        raise BatchInferError(f"tensor {tensor.name} has {len(data)} rows where the metadata says {len(row_order)}")
    for start in range(0, len(data), step):
        rows = slice(start, start + step) if row_order is None else row_order[start : start + step]
        yield np.array(data[rows])


def _dequantize(rows: npt.NDArray[Any], tensor: "ReaderTensor") -> npt.NDArray[np.float32]:
    from gguf.quants import dequantize

    try:
        return np.array(dequantize(rows, tensor.tensor_type), dtype=np.float32)
    except NotImplementedError as error:
        raise BatchInferError(f"tensor {tensor.name}: type {tensor.tensor_type.name} is not supported") from error


def _write_tensor(file: BinaryIO, tensor: "torch.Tensor") -> None:
    import torch

    file.write(tensor.contiguous().view(torch.uint8).numpy().data)
