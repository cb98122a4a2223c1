"""What each format reader offers to models/weights: which layers of a checkpoint are quantised, and their weights."""

from collections.abc import Callable
from typing import Protocol, TypeAlias, TypeVar

from batchinfer.kernels.quantized_linear.stored import Fp8Weight, IntegerWeight
from batchinfer.quantization.tensors import ModuleTensors

Stored: TypeAlias = IntegerWeight | Fp8Weight
_Made = TypeVar("_Made")


class QuantizationScheme(Protocol):
    """How a checkpoint's linear layers are quantised."""

    @property
    def method(self) -> str:
        """The name that `--quantization` gives it."""
        ...

    @property
    def description(self) -> str:
        """In words, as in "4 bits in groups of 128 (gemm)"."""
        ...

    def is_quantized(self, tensors: ModuleTensors) -> bool:
        """Whether the file has the layer quantised. What is in the file decides; the config's list of unquantised
        layers does where the file has both forms, because lists err (substrings that match too much, names of another
        model class) and some are not stored at all."""
        ...

    def read(self, tensors: ModuleTensors, num_outputs: int, num_inputs: int) -> Stored:
        """The weight, its tensors ticked off. Raises BatchInferError naming a tensor that is missing or of another
        shape."""
        ...


def checked(tensors: ModuleTensors, make: Callable[[], _Made]) -> _Made:
    """make(), with its ValueError as an error of the layer."""
    try:
        return make()
    except ValueError as error:
        raise tensors.fault(f"{tensors.module}: {error}") from error
