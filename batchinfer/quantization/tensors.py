"""The tensors of one linear layer in a checkpoint, checked and ticked off as they are read. Made by models/weights for
the format readers of this room."""

from collections.abc import Collection
from typing import Protocol

import torch
from torch import Tensor

from batchinfer.errors import BatchInferError


class TensorSource(Protocol):
    """Named tensors, read when asked for."""

    @property
    def where(self) -> str:
        """For messages."""
        ...

    @property
    def names(self) -> Collection[str]: ...

    def read(self, name: str) -> Tensor: ...


class ModuleTensors:
    """The tensors whose names are `module`, a dot and a suffix.

    unused: names that nobody has read yet; shared by the modules of a model, and diminished here.
    device: where tensors are put, so that a GPU does the unpacking for itself.
    """

    def __init__(self, source: TensorSource, module: str, unused: set[str], device: torch.device) -> None:
        self._source = source
        self._unused = unused
        self.device = device
        self.module = module

    def has(self, suffix: str) -> bool:
        """Whether the file has the tensor and nobody has read it."""
        return f"{self.module}.{suffix}" in self._unused

    def dtype(self, suffix: str) -> torch.dtype | None:
        """Of a tensor that stays unread; None where there is none."""
        return self._source.read(f"{self.module}.{suffix}").dtype if self.has(suffix) else None

    def take(self, suffix: str, dtypes: Collection[torch.dtype], shape: tuple[int | None, ...] | None) -> Tensor:
        """The tensor. shape: a size that is None may be any, and so may a shape that is None.

        Raises BatchInferError where the tensor is missing or another one.
        """
        name = f"{self.module}.{suffix}"
        if not self.has(suffix):
            raise self.fault(f"there is no tensor {name}")
        self._unused.discard(name)
        tensor = self._source.read(name).to(self.device)
        if tensor.dtype not in dtypes or not _fits(tensor.shape, shape):
            wanted = " or ".join(_name(dtype) for dtype in dtypes)
            sizes = "" if shape is None else f" [{', '.join('any' if size is None else str(size) for size in shape)}]"
            raise self.fault(f"tensor {name} is {_name(tensor.dtype)} {list(tensor.shape)}, not {wanted}{sizes}")
        return tensor

    def drop(self, *suffixes: str) -> None:
        """Ticks off tensors, where they are there, that have no bearing on the weight."""
        self._unused.difference_update(f"{self.module}.{suffix}" for suffix in suffixes)

    def fault(self, problem: str) -> BatchInferError:
        return BatchInferError(f"{self._source.where}: {problem}")


def _fits(found: torch.Size, wanted: tuple[int | None, ...] | None) -> bool:
    if wanted is None:
        return True
    return len(found) == len(wanted) and all(w in (None, f) for w, f in zip(wanted, found, strict=True))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
