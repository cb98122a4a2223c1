"""The safetensors files of a model directory as named tensors. Called by loader."""

import json
from collections.abc import Collection
from pathlib import Path

from torch import Tensor

from batchinfer.errors import BatchInferError

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"


class SafetensorsCheckpoint:
    """One file, whatever its name, or the shards that an index names. Raises BatchInferError where files are missing or
    broken."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file_of_tensor = self._list()

    @property
    def where(self) -> str:
        return str(self._path)

    @property
    def names(self) -> Collection[str]:
        return self._file_of_tensor.keys()

    def read(self, name: str) -> Tensor:
        """The tensor on the CPU, as stored; it may share memory with a mapping of its file.

        The file is mapped anew each time, because pages that were read count as the process's memory for as long as
        the mapping lives.
        """
        from safetensors import safe_open

        with safe_open(self._file_of_tensor[name], framework="pt") as file:
            return file.get_tensor(name)

    def _list(self) -> dict[str, Path]:
        index = self._path / _INDEX
        if (self._path / _SINGLE).exists():
            return dict.fromkeys(_tensor_names(self._path / _SINGLE), self._path / _SINGLE)
        if not index.exists():
            return self._list_other()
        shards = {self._path / name for name in json.loads(index.read_text())["weight_map"].values()}
        return {name: shard for shard in sorted(shards) for name in _tensor_names(shard)}

    def _list_other(self) -> dict[str, Path]:
        """Older quantisers name the file after its bits and groups."""
        files = list(self._path.glob("*.safetensors"))
        if len(files) != 1:
            raise BatchInferError(
                f"{self._path}: there is neither {_SINGLE} nor {_INDEX}, but {len(files)} other .safetensors files; "
                "only safetensors are loaded"
            )
        return dict.fromkeys(_tensor_names(files[0]), files[0])


def _tensor_names(file: Path) -> list[str]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="pt") as opened:
            return list(opened.keys())
    except (OSError, SafetensorError) as error:
        raise BatchInferError(f"{file}: {error}") from error
