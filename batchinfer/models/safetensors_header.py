"""The head of a safetensors file: read without its tensors by fingerprint and planning/model_size, and made by
gguf_weights and conversion/checkpoint_files, which stream the tensors after it. Free of torch. Source of the layout:
safetensors' README."""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import IO, TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import torch

_DTYPES = {  # torch's name: the file's, and bytes of an element
    "float64": ("F64", 8),
    "float32": ("F32", 4),
    "float16": ("F16", 2),
    "bfloat16": ("BF16", 2),
    "float8_e4m3fn": ("F8_E4M3", 1),
    "float8_e5m2": ("F8_E5M2", 1),
    "float8_e8m0fnu": ("F8_E8M0", 1),
    "int64": ("I64", 8),
    "int32": ("I32", 4),
    "int16": ("I16", 2),
    "int8": ("I8", 1),
    "uint8": ("U8", 1),
    "bool": ("BOOL", 1),
}
_ITEM_BYTES = dict(_DTYPES.values())
_ALIGNMENT = 8  # of the first tensor
_LARGEST = 100_000_000  # bytes of a table; as safetensors itself refuses more


class TensorPlace(NamedTuple):
    """As the table has it. dtype: as in "BF16". start, stop: bytes in the file."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int

    @property
    def num_bytes(self) -> int:
        return self.stop - self.start


class Head(NamedTuple):
    """num_bytes: before the first tensor. tensors: by name, in the order of the table."""

    num_bytes: int
    tensors: dict[str, TensorPlace]


def read_head(file: IO[bytes]) -> Head:
    """file: from its beginning. Raises ValueError where it has no such head."""
    length = int.from_bytes(file.read(8), "little")
    if length > _LARGEST:
        raise ValueError("its head is too long")
    first = 8 + length
    try:
        table: dict[str, Any] = json.loads(file.read(length))
        table.pop("__metadata__", None)
        return Head(first, {name: _place(entry, first) for name, entry in table.items()})
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"its head lacks what each tensor has: {error}") from error


def _place(entry: Mapping[str, Any], first: int) -> TensorPlace:
    start, stop = entry["data_offsets"]
    return TensorPlace(entry["dtype"], tuple(entry["shape"]), first + start, first + stop)


def dtype_name(dtype: "torch.dtype") -> str:
    """What the file calls it."""
    return _DTYPES[str(dtype).removeprefix("torch.")][0]


def num_bytes(dtype: str, shape: Sequence[int]) -> int:
    """Of a tensor. dtype: as the file calls it."""
    return _ITEM_BYTES[dtype] * math.prod(shape)


def header(tensors: Iterable[tuple[str, str, Sequence[int]]]) -> bytes:
    """tensors: name, dtype as the file calls it, and shape, in the order in which they follow the head."""
    table: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    stop = 0
    for name, dtype, shape in tensors:
        start, stop = stop, stop + num_bytes(dtype, shape)
        table[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [start, stop]}
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text
