"""A GGUF file of the Llama family to a Hugging Face model directory: config, tokenizer and safetensors, dequantised or
with the quantised blocks as they are. Called by models/resolve.py and models/default_model.py."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from batchinfer.errors import BatchInferError
from batchinfer.models.fingerprint import file_digest
from batchinfer.models.gguf_config import make_config, make_generation_config
from batchinfer.models.gguf_tokenizer import check_tokenizer, control_tokens, write_tokenizer
from batchinfer.models.gguf_weights import quantized_types, stored_dtype, tensor_shape, write_weights
from batchinfer.models.model_cache import build_once

if TYPE_CHECKING:
    from gguf import GGUFReader

_FORMAT = 1  # part of the cached name: raise it when the conversion writes something else
_ROPE_FACTORS = "rope_freqs.weight"


def cached_conversion(path: Path, packed: bool = False) -> Path:
    """The converted model of a GGUF file, made on the first call; the cached name holds a digest of the content.
    packed: as for convert_gguf."""
    form = "packed-" if packed else ""
    name = f"gguf-{file_digest(path)[:16]}-{form}v{_FORMAT}"
    return build_once(name, lambda directory: convert_gguf(path, directory, packed))


def convert_gguf(path: Path, directory: Path, packed: bool = False) -> None:
    """Write config.json, generation_config.json, the tokenizer, model.safetensors and source.json into a directory.

    Weights keep their type where they are float32 or float16, and become bfloat16 where they are quantised; packed
    leaves quantised matrices in their blocks, which quantization/read_gguf reads. Raises BatchInferError, naming the
    file, where it is not readable or holds what the Llama family does not have, and with `packed` where its blocks are
    of a type that does not run as it is.
    """
    try:
        reader = _open(path)
        metadata = read_metadata(reader)
        _convert(reader, metadata, directory, packed)
    except BatchInferError as error:
        raise BatchInferError(f"{path}: {error}") from error
    source = {"licence": metadata.get("general.license"), "gguf": path.name}
    _write_json(directory / "source.json", source)


def read_metadata(reader: "GGUFReader") -> dict[str, Any]:
    """Key to value; the head's own fields (version and counts) left out."""
    fields = {name: field for name, field in reader.fields.items() if not name.startswith("GGUF.")}
    return {name: field.contents() for name, field in fields.items()}


def _open(path: Path) -> "GGUFReader":
    from gguf import GGUFReader

    try:
        return GGUFReader(path)
    except (ValueError, IndexError, KeyError, OverflowError) as error:
        raise BatchInferError(f"not a readable GGUF file ({error})") from error


def _convert(reader: "GGUFReader", metadata: Mapping[str, Any], directory: Path, packed: bool) -> None:
    if metadata.get("split.count", 0) > 1:
        raise BatchInferError("one part of a split file; join the parts first (llama-gguf-split --merge)")
    if "general.architecture" not in metadata:
        raise BatchInferError("the key general.architecture is missing: not a model")
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    rope_factors = tensors.pop(_ROPE_FACTORS, None)
    for required in ("token_embd.weight", "output_norm.weight"):
        if required not in tensors:
            raise BatchInferError(f"tensor {required} is missing: not a language model")
    shapes = {name: tensor_shape(tensor) for name, tensor in tensors.items()}
    factors = None if rope_factors is None else rope_factors.data
    config = make_config(metadata, shapes, factors, stored_dtype(tensors))
    types = quantized_types(tensors) if packed else {}
    if types:
        config["quantization_config"] = {"quant_method": "gguf", "types": types}
    check_tokenizer(metadata)
    _write_json(directory / "config.json", config)
    _write_json(directory / "generation_config.json", make_generation_config(metadata, control_tokens(metadata)))
    write_tokenizer(metadata, directory)
    write_weights(tensors, config, directory / "model.safetensors", types.keys())


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")
