"""From a model directory to a Decoder and to what its config files say. Called by executors and the pipeline; load_spec
and read_config import no torch."""

import json
from collections.abc import Callable, Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from batchinfer.config import ModelConfig
from batchinfer.errors import BatchInferError
from batchinfer.models.families.registry import parse_config
from batchinfer.models.spec import DecoderSpec
from batchinfer.options import OptionValue

if TYPE_CHECKING:
    from batchinfer.models.decoder import Decoder
    from batchinfer.quantization.scheme import QuantizationScheme

_CONFIG_KEYS = ("quantization_config", "compression_config")  # the latter is compressed-tensors' older name
_CONFIG_FILES = ("hf_quant_config.json", "quantize_config.json", "quant_config.json")


def load_decoder(
    path: Path,
    dtype: str = "auto",
    device: str = "cpu",
    allow_config_fields: Collection[str] = (),
    activation_dtype: str = "auto",
    quantization: str = "auto",
    report: Callable[[str], None] = lambda line: None,
    load_format: str = "auto",
) -> "Decoder":
    """path: a directory with config.json and safetensors. dtype: one of config.DTYPES; auto is own_dtype. device: a
    torch device. activation_dtype: one of config.ACTIVATION_DTYPES. quantization: one of config.QUANTIZATIONS. report:
    gets a line about quantised weights. load_format: one of config.LOAD_FORMATS. Raises BatchInferError naming the
    field, parameter or tensor at fault, and UsageError where the checkpoint is not what `quantization` says."""
    import torch

    from batchinfer.cache.paged_kv import TORCH_DTYPES
    from batchinfer.models.checkpoint import SafetensorsCheckpoint
    from batchinfer.models.dummy import DummyCheckpoint
    from batchinfer.models.weights import build_decoder
    from batchinfer.quantization.config import check_described
    from batchinfer.quantization.kv_scales import cache_dtypes

    spec = load_spec(path, allow_config_fields)
    scheme = load_scheme(path, quantization)
    if dtype == "auto":
        dtype = own_dtype(path, spec, scheme is not None)
    is_dummy = load_format == "dummy"
    source = DummyCheckpoint(spec, scheme, torch.device(device)) if is_dummy else SafetensorsCheckpoint(path)
    if scheme is None:
        check_described(source.names, source.where)
    else:
        activations = _activations(spec, dtype, activation_dtype, device)
        report(f"weights: {scheme.method}, {scheme.description}; activations {activations}")
    return build_decoder(
        spec,
        source,
        TORCH_DTYPES[dtype],
        torch.device(device),
        activation_dtype,
        scheme=scheme,
        kv_scale_dtypes=cache_dtypes((quantization_config(path) or ({}, ""))[0]),
    )


def load_spec(path: Path, allow_config_fields: Collection[str] = ()) -> DecoderSpec:
    """allow_config_fields: unknown fields that are taken to be harmless."""
    return parse_config(read_config(path), str(path / "config.json"), allow_config_fields)


def load_scheme(path: Path, quantization: str = "auto") -> "QuantizationScheme | None":
    """How a model directory's linear layers are quantised; None: not at all. quantization: one of
    config.QUANTIZATIONS. Raises BatchInferError on a config that is not read, UsageError on another method than asked
    for."""
    from batchinfer.quantization.config import check_wanted, parse

    found = quantization_config(path)
    scheme = None if found is None else parse(*found)
    check_wanted(quantization, scheme, str(path))
    return scheme


def quantization_config(path: Path) -> tuple[dict[str, Any], str] | None:
    """The quantisation config of a model directory and where it stands: a field of config.json, or a file beside it, as
    older quantisers and ModelOpt write it. None where there is neither."""
    config = read_config(path)
    places = [(config.get(key), f"{path / 'config.json'}: {key}") for key in _CONFIG_KEYS]
    places += [(_read_json(path / name), str(path / name)) for name in _CONFIG_FILES if (path / name).exists()]
    for value, where in places:
        if value:
            if not isinstance(value, dict):
                raise BatchInferError(f"{where} must be an object, not {value!r}")
            return value, where
    return None


def own_dtype(path: Path, spec: DecoderSpec, is_quantized: bool) -> str:
    """The precision that --dtype auto stands for. Raises BatchInferError where config.json states none.

    Quantised checkpoints that state float16 run in bf16: quantisers state it for the kernels that they were written
    with, and activations of models that were trained in bfloat16 pass float16's range.
    """
    if spec.dtype is None:
        raise BatchInferError(f"{path / 'config.json'}: it does not state a dtype; choose one with --dtype")
    return "bf16" if is_quantized and spec.dtype == "fp16" else spec.dtype


def checkpoint_options(path: Path, config: ModelConfig) -> dict[str, OptionValue]:
    """What --quantization auto and --dtype auto stand for with this model. Errors as load_decoder's."""
    scheme = load_scheme(path, config.quantization)
    spec = load_spec(path, config.allowed_config_fields)
    values = {"quantization": "none" if scheme is None else scheme.method}
    if spec.dtype is not None:
        values["dtype"] = own_dtype(path, spec, scheme is not None)
    return {name: OptionValue(value, "checkpoint") for name, value in values.items()}


def _activations(spec: DecoderSpec, dtype: str, activation_dtype: str, device: str) -> str:
    if activation_dtype == "fp8":
        return "fp8 with a scale a token" + (", computed in float32 on a CPU" if device == "cpu" else "")
    if activation_dtype != "auto":
        return f"and weights {activation_dtype}, made from them at load"
    if spec.dtype == "fp16" and dtype == "bf16":
        return "bf16 (config.json says float16, whose range they may pass; --dtype fp16 takes it)"
    return dtype


def read_config(path: Path) -> dict[str, Any]:
    """config.json of a model directory."""
    return _read_json(path / "config.json")


def generation_config(path: Path) -> dict[str, Any]:
    """generation_config.json of a model directory; empty where there is none."""
    file = path / "generation_config.json"
    return _read_json(file) if file.exists() else {}


def eos_token_ids(path: Path) -> frozenset[int]:
    """The union of the ids in config.json and in generation_config.json."""
    ids: set[int] = set()
    for config in (read_config(path), generation_config(path)):
        value = config.get("eos_token_id")
        if value is not None:
            ids.update(value if isinstance(value, list) else [value])
    return frozenset(ids)


def _read_json(file: Path) -> dict[str, Any]:
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise BatchInferError(f"{file}: {error}") from error
    if not isinstance(value, dict):
        raise BatchInferError(f"{file}: it must hold a JSON object")
    return value
