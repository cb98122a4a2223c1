"""From a model directory to a Decoder and to what its config files say. Called by executors; load_spec and the config
readers import no torch."""

import json
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from batchinfer.errors import BatchInferError
from batchinfer.models.families.registry import parse_config
from batchinfer.models.spec import DecoderSpec

if TYPE_CHECKING:
    from batchinfer.models.decoder import Decoder


def load_decoder(
    path: Path,
    dtype: str = "auto",
    device: str = "cpu",
    allow_config_fields: Collection[str] = (),
    activation_dtype: str = "auto",
) -> "Decoder":
    """path: a directory with config.json and safetensors. dtype: one of config.DTYPES; auto is the checkpoint's own.
    device: a torch device. activation_dtype: one of config.ACTIVATION_DTYPES. Raises BatchInferError naming the field,
    parameter or tensor at fault."""
    import torch

    from batchinfer.cache.paged_kv import TORCH_DTYPES
    from batchinfer.models.checkpoint import SafetensorsCheckpoint
    from batchinfer.models.weights import build_decoder

    spec = load_spec(path, allow_config_fields)
    if dtype == "auto":
        if spec.dtype is None:
            raise BatchInferError(f"{path / 'config.json'}: it does not state a dtype; choose one with --dtype")
        dtype = spec.dtype
    source = SafetensorsCheckpoint(path)
    return build_decoder(spec, source, TORCH_DTYPES[dtype], torch.device(device), activation_dtype)


def load_spec(path: Path, allow_config_fields: Collection[str] = ()) -> DecoderSpec:
    """allow_config_fields: unknown fields that are taken to be harmless."""
    return parse_config(read_config(path), str(path / "config.json"), allow_config_fields)


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
