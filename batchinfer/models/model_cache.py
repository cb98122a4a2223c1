"""The directory where converted models live, and the one way to put a model into it. Called by gguf_conversion and
default_model."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

from batchinfer.cache_directory import cache_directory
from batchinfer.errors import BatchInferError


def cached_model(name: str) -> Path | None:
    """The model directory `name`, where an earlier `build_once` made it."""
    final = cache_directory() / "models" / name
    return final if final.is_dir() else None


def build_once(name: str, build: Callable[[Path], None]) -> Path:
    """The cached model directory `name`; made by `build(empty directory)` where it is not there yet.

    A directory under its final name is always whole: it is built under another name and renamed. Processes that want
    the same model at once wait for the one that builds it; what a killed process left behind is cleared. Raises
    BatchInferError where the cache cannot be written.
    """
    if (found := cached_model(name)) is not None:
        return found
    models = cache_directory() / "models"
    try:
        return _build(models, name, build)
    except OSError as error:
        raise BatchInferError(
            f"the model cache {models} cannot be filled ({error}); set BATCHINFER_CACHE to a directory with room"
        ) from error


def _build(models: Path, name: str, build: Callable[[Path], None]) -> Path:
    import filelock

    final = models / name
    models.mkdir(parents=True, exist_ok=True)
    with filelock.FileLock(models / f".{name}.lock"):
        if not final.is_dir():
            partial = models / f".{name}.partial"
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir()
            try:
                build(partial)
                os.rename(partial, final)
            finally:
                shutil.rmtree(partial, ignore_errors=True)
    return final
