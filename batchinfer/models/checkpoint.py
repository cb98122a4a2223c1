"""The safetensors files of a model directory as named tensors. Called by loader, and by planning/ for their places."""

import json
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING

from batchinfer.errors import BatchInferError

if TYPE_CHECKING:
    from torch import Tensor

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"


class SafetensorsCheckpoint:
    """One file, whatever its name, or the shards that an index names. Raises BatchInferError where files are missing or
    broken."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file_of_tensor = {name: file for file in weight_files(path) for name in _tensor_names(file)}

    @property
    def where(self) -> str:
        return str(self._path)

    @property
    def names(self) -> Collection[str]:
        return self._file_of_tensor.keys()

    def read(self, name: str) -> "Tensor":
        """The tensor on the CPU, as stored; it may share memory with a mapping of its file.

        The file is mapped anew each time, because pages that were read count as the process's memory for as long as
        the mapping lives.
        """
        from safetensors import safe_open

        with safe_open(self._file_of_tensor[name], framework="pt") as file:
            return file.get_tensor(name)


def weight_files(path: Path) -> list[Path]:
    """Those that hold the model directory's tensors: a single one, the shards of an index, or, as older quantisers name
    it after its bits and groups, the only one. Raises BatchInferError where there is none of these."""
    index, single = path / _INDEX, path / _SINGLE
    if single.exists():
        return [single]
    if index.exists():
        return sorted({path / name for name in json.loads(index.read_text())["weight_map"].values()})
    files = list(path.glob("*.safetensors"))
    if len(files) != 1:
        raise BatchInferError(
            f"{path}: there is neither {_SINGLE} nor {_INDEX}, but {len(files)} other .safetensors files; only "
            "safetensors are loaded"
        )
    return files


def _tensor_names(file: Path) -> list[str]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="pt") as opened:
            return list(opened.keys())
    except (OSError, SafetensorError) as error:
        raise BatchInferError(f"{file}: {error}") from error
