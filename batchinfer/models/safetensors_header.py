"""The head of a safetensors file, for writers that stream its tensors after it. Called by gguf_weights and
conversion/checkpoint_files. Free of torch. Source of the layout: safetensors' README."""

import json
import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

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
