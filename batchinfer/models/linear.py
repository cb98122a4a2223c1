"""The one place where activations meet a weight matrix; attention, mlp and the decoder's head call it."""

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from batchinfer.kernels.gated_activation import ActivationKind
from batchinfer.kernels.quantized_linear import (
    PackedWeight,
    QuantizedWeight,
    can_pack_bf16,
    check_fp8_device,
    fp8_linear,
    gated_linear,
    pack_fp8_weight,
    pack_weight,
    packed_linear,
    quantize_weight,
    quantized_linear,
)
from batchinfer.kernels.quantized_linear.stored import Fp8Weight, IntegerWeight

ROW_MULTIPLE = 4


class Projection(Protocol):
    """y = x W^T + b. On a CPU a row's result is independent of how many rows there are; on a GPU its last bits are
    not."""

    @property
    def nbytes(self) -> int:
        """Of weight and bias."""
        ...

    def __call__(self, x: Tensor) -> Tensor:
        """x: [num_rows, in_features] to [num_rows, out_features], x's dtype."""
        ...

    def fill(self, out: Tensor, x: Tensor) -> None:
        """The same into `out`, float32."""
        ...


class Lookup(Protocol):
    """A table of vectors."""

    @property
    def nbytes(self) -> int: ...

    def rows(self, ids: Tensor) -> Tensor:
        """int64 [n] to [n, width]"""
        ...


class Linear:
    """A projection in the weight's own precision.

    weight: [out_features, in_features]; bias: [out_features] or None, the weight's dtype.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.weight = weight
        self.bias = bias

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes + (0 if self.bias is None else self.bias.nbytes)

    def __call__(self, x: Tensor) -> Tensor:
        num_rows = x.shape[0]
        missing = -num_rows % ROW_MULTIPLE
        # The CPU's float32 product shares rows among threads, and a share of fewer than 4 rows takes other code with
        # another rounding. Multiples of 4 never leave such a share; 16-bit products do not have the fault.
        if missing and x.device.type == "cpu" and x.dtype == torch.float32:
            return F.linear(F.pad(x, (0, 0, 0, missing)), self.weight, self.bias)[:num_rows]
        return F.linear(x, self.weight, self.bias)

    def fill(self, out: Tensor, x: Tensor) -> None:
        out.copy_(self(x))

    def rows(self, ids: Tensor) -> Tensor:
        """As Lookup's, of the weight."""
        return F.embedding(ids, self.weight)


class Int8Linear:
    """A projection by 8-bit integers: the weight is quantised here, once, and activations at each call.

    is_gated: the first half of the outputs are a gate of the second, and `gated` will be called where it can.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None, is_gated: bool = False) -> None:
        self._weight = quantize_weight(weight, is_gated)
        self._bias = None if bias is None else bias.to(torch.float32)

    @property
    def nbytes(self) -> int:
        return self._weight.nbytes + (0 if self._bias is None else self._bias.nbytes)

    def __call__(self, x: Tensor) -> Tensor:
        return quantized_linear(x, self._weight, self._bias)

    def fill(self, out: Tensor, x: Tensor) -> None:
        quantized_linear(x, self._weight, self._bias, out)

    @property
    def can_gate(self) -> bool:
        """Whether `gated` is faster than the activation after the product."""
        return isinstance(self._weight, QuantizedWeight) and self._weight.is_paired

    def gated(self, x: Tensor, activation: ActivationKind) -> Tensor:
        """act(first half of the outputs) * second half: [num_rows, out_features / 2]"""
        return gated_linear(x, self._weight, self._bias, activation)


class PackedLinear:
    """A projection whose weight lies in the order that its product reads it in: a checkpoint's quantised weight, as it
    is, or a bf16 one. Activations keep their precision, and sums are float32.

    bias: [out_features] or None. is_gated: as Int8Linear's.
    """

    def __init__(
        self, weight: IntegerWeight | Fp8Weight | Tensor, bias: Tensor | None = None, is_gated: bool = False
    ) -> None:
        self._weight = pack_weight(weight, is_gated)
        self._bias = None if bias is None else bias.to(torch.float32)

    @staticmethod
    def is_best_for(weight: Tensor) -> bool:
        """Whether it is faster than Linear."""
        return can_pack_bf16(weight)

    def scratch_bytes(self, dtype: torch.dtype) -> int:
        """What products with many rows of `dtype` take beside their operands."""
        return self._weight.scratch_bytes(dtype)

    @property
    def nbytes(self) -> int:
        return self._weight.nbytes + (0 if self._bias is None else self._bias.nbytes)

    def __call__(self, x: Tensor) -> Tensor:
        return packed_linear(x, self._weight, self._bias)

    def fill(self, out: Tensor, x: Tensor) -> None:
        packed_linear(x, self._weight, self._bias, out)

    @property
    def gives_rows(self) -> bool:
        """Whether it can be a Lookup of its weight, too."""
        return self._bias is None and isinstance(self._weight, PackedWeight) and self._weight.gives_rows

    def rows(self, ids: Tensor) -> Tensor:
        """As Lookup's, of the weight."""
        return self._weight.rows(ids)

    @property
    def can_gate(self) -> bool:
        """Whether `gated` is faster than the activation after the product."""
        return isinstance(self._weight, PackedWeight) and self._weight.is_paired

    def gated(self, x: Tensor, activation: ActivationKind) -> Tensor:
        """act(first half of the outputs) * second half: [num_rows, out_features / 2]"""
        return gated_linear(x, self._weight, self._bias, activation)


class Fp8Linear:
    """A projection by e4m3 numbers: a checkpoint's own of up to 4 bits or fp8, or made of the weight here, once.
    Activations are quantised at each call, and sums are float32.

    bias: [out_features] or None.
    """

    def __init__(self, weight: IntegerWeight | Fp8Weight | Tensor, bias: Tensor | None = None) -> None:
        self._weight = pack_fp8_weight(weight)
        self._bias = None if bias is None else bias.to(torch.float32)

    @staticmethod
    def check(device: torch.device) -> None:
        """Raises ValueError where a device has no such products."""
        check_fp8_device(device)

    @property
    def nbytes(self) -> int:
        return self._weight.nbytes + (0 if self._bias is None else self._bias.nbytes)

    def __call__(self, x: Tensor) -> Tensor:
        return fp8_linear(x, self._weight, self._bias)

    def fill(self, out: Tensor, x: Tensor) -> None:
        fp8_linear(x, self._weight, self._bias, out)


class SideBySide:
    """Projections of the same input whose outputs follow each other, because their weights are stored differently."""

    def __init__(self, parts: Sequence[Projection]) -> None:
        self._parts = parts

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self._parts)

    def __call__(self, x: Tensor) -> Tensor:
        return torch.cat([part(x) for part in self._parts], dim=-1)

    def fill(self, out: Tensor, x: Tensor) -> None:
        out.copy_(self(x))
