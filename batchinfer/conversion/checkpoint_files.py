"""Writes the finished checkpoint: safetensors files streamed tensor by tensor, their index, config.json and what the
model directory has beside its weights. Called by quantize_job."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from batchinfer.data.storage import Storage
from batchinfer.models.safetensors_header import dtype_name, header, num_bytes
from batchinfer.quantization.tensors import TensorSource

SHARD_BYTES = 4 << 30
WRITE_BYTES = 16 << 20  # at once: what is written is copied
_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_BESIDE = (
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
    "source.json",
    "README.md",
    "LICENSE",
)


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """A tensor of the output, read when its turn comes. dtype: as safetensors names it."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    read: Callable[[], Tensor]

    @property
    def num_bytes(self) -> int:
        return num_bytes(self.dtype, self.shape)


def entries_of(file: Path) -> list[TensorEntry]:
    """All tensors of a safetensors file."""
    from safetensors import safe_open

    def reader(name: str) -> Callable[[], Tensor]:
        def read() -> Tensor:
            with safe_open(file, framework="pt") as opened:  # a mapping's pages count as memory while it lives
                return opened.get_tensor(name)

        return read

    with safe_open(file, framework="pt") as opened:
        slices = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118 (no mapping)
        return [TensorEntry(n, s.get_dtype(), tuple(s.get_shape()), reader(n)) for n, s in slices.items()]


def entry_of(source: TensorSource, name: str) -> TensorEntry:
    """A tensor of the model as it is."""
    tensor = source.read(name)  # a mapping: its pages are read when it is written
    return TensorEntry(name, dtype_name(tensor.dtype), tuple(tensor.shape), lambda: source.read(name))


def write_weights(storage: Storage, entries: Sequence[TensorEntry], shard_bytes: int = SHARD_BYTES) -> None:
    """One file, or several of at most `shard_bytes` with an index, in the order given."""
    shards = _shards(entries, shard_bytes)
    if len(shards) == 1:
        _write_file(storage, _SINGLE, shards[0])
        return
    names = [f"model-{number:05}-of-{len(shards):05}.safetensors" for number in range(1, len(shards) + 1)]
    for name, shard in zip(names, shards, strict=True):
        _write_file(storage, name, shard)
    weight_map = {entry.name: name for name, shard in zip(names, shards, strict=True) for entry in shard}
    total = sum(entry.num_bytes for entry in entries)
    put_json(storage, _INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})


def copy_beside(storage: Storage, source: Path) -> None:
    """Tokenizer, chat template, generation config, licence: whatever of those the model has."""
    for name in _BESIDE:
        if (source / name).is_file():
            storage.put(name, (source / name).read_bytes())


def put_json(storage: Storage, name: str, value: Any) -> None:
    storage.put(name, (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode())


def _shards(entries: Sequence[TensorEntry], shard_bytes: int) -> list[list[TensorEntry]]:
    shards: list[list[TensorEntry]] = [[]]
    size = 0
    for entry in entries:
        if shards[-1] and size + entry.num_bytes > shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(entry)
        size += entry.num_bytes
    return shards


def _write_file(storage: Storage, name: str, entries: Sequence[TensorEntry]) -> None:
    with storage.create(name) as file:
        file.write(header((entry.name, entry.dtype, entry.shape) for entry in entries))
        for entry in entries:
            octets: Any = entry.read().contiguous().flatten().view(torch.uint8).numpy()
            for start in range(0, len(octets), WRITE_BYTES):
                file.write(octets[start : start + WRITE_BYTES])
