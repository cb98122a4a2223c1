"""The forms in which a GPU holds a quantised weight, and the numbers they stand for. Made where a weight is on a GPU,
read by the gpu modules."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from batchinfer.kernels.quantized_linear.packed import Kind
from batchinfer.kernels.quantized_linear.stored import Fp8Weight, IntegerWeight
from batchinfer.kernels.quantized_linear.weight import ROTATION
from torch import Tensor

RUNS = (64, 32)  # inputs that share a scale and are multiplied at once


@dataclass(frozen=True, slots=True)
class GpuWeight:
    """A weight [num_outputs, num_inputs] in runs of inputs, filled up with zeros to a whole number of them (an even one
    with 4 bits).

    values: uint8. With 4 bits [num_outputs, inputs / 2]: two runs side by side, the first in the low half of each byte.
    With 8 bits and fp8 [num_outputs, inputs].
    scales: float32 [groups, num_outputs], of `group_runs` runs each. zeros, offsets: the same or None: the numbers
    stand for (value - zero) * scale, or value * scale + offset.
    permutation: int64 [num_inputs], input that each column meets, or None.
    """

    kind: Kind
    values: Tensor
    scales: Tensor
    zeros: Tensor | None
    offsets: Tensor | None
    run: int
    group_runs: int
    permutation: Tensor | None
    num_outputs: int
    num_inputs: int

    @property
    def nbytes(self) -> int:
        return sum(
            t.nbytes for t in (self.values, self.scales, self.zeros, self.offsets, self.permutation) if t is not None
        )

    def grouping(self) -> dict[str, int]:
        """Arguments of the kernels that tell which runs share parameters; all of them: GROUP_RUNS is 0."""
        num_groups = len(self.scales)
        return {"num_groups": num_groups, "RUN": self.run, "GROUP_RUNS": self.group_runs if num_groups > 1 else 0}

    def scratch_bytes(self, dtype: torch.dtype) -> int:
        """What a product with many rows of `dtype` takes beside its operands: the weight in that dtype."""
        return self.num_outputs * self.num_inputs * dtype.itemsize

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """[num_outputs, num_inputs] in the order of the inputs, computed in float32 and rounded once."""
        numbers = self._numbers()
        group = torch.arange(self.num_inputs, device=numbers.device) // (self.run * self.group_runs)
        numbers = numbers[:, : self.num_inputs]
        if self.zeros is not None:
            numbers = numbers - self.zeros[group].T
        numbers = numbers * self.scales[group].T
        if self.offsets is not None:
            numbers = numbers + self.offsets[group].T
        if self.permutation is None:
            return numbers.to(dtype)
        out = torch.empty(numbers.shape, dtype=dtype, device=numbers.device)
        out[:, self.permutation] = numbers.to(dtype)
        return out

    def _numbers(self) -> Tensor:
        """float32 [num_outputs, inputs with filling]"""
        if self.kind == Kind.INT4:
            packed = self.values.view(self.num_outputs, -1, 1, self.run)
            return torch.cat((packed & 15, packed >> 4), dim=2).flatten(1).to(torch.float32)
        values = self.values.view(torch.float8_e4m3fn) if self.kind == Kind.E4M3 else self.values
        return values.to(torch.float32)


@dataclass(frozen=True, slots=True)
class Int8GpuWeight:
    """The int8 form of a weight [num_outputs, num_inputs] on a GPU: QuantizedWeight's numbers in another order.

    values: int8 [num_outputs, inputs], filled up with zeros to whole groups; scales: float32 [groups, num_outputs].
    """

    values: Tensor
    scales: Tensor
    num_outputs: int
    num_inputs: int

    @property
    def nbytes(self) -> int:
        return self.values.nbytes + self.scales.nbytes

    def rows(self) -> tuple[Tensor, Tensor]:
        """As QuantizedWeight.rows."""
        filled = -(-self.num_inputs // ROTATION) * ROTATION
        return self.values[:, :filled], self.scales.T


def pack_weight(weight: IntegerWeight | Fp8Weight) -> GpuWeight:
    """Raises ValueError on groups that are no multiple of 32 inputs."""
    if isinstance(weight, IntegerWeight):
        values, group, permutation = weight.values, weight.group_size, weight.permutation
        kind = Kind.INT4 if weight.bits <= 4 else Kind.UINT8
        scales, zeros, offsets = weight.scales, weight.zeros, weight.offsets
    else:
        values, group, permutation = weight.values.view(torch.uint8), weight.block[1], None
        kind, scales, zeros, offsets = Kind.E4M3, weight.row_scales(), None, None
    num_outputs, num_inputs = values.shape
    run = _run_of(group, num_inputs)
    filled = F.pad(values, (0, -num_inputs % (2 * run)))
    if kind == Kind.INT4:
        low, high = filled.view(num_outputs, -1, 2, run).unbind(2)
        filled = (low | (high << 4)).reshape(num_outputs, -1)
    return GpuWeight(
        kind,
        filled.contiguous(),
        _by_group(scales),
        None if zeros is None else _by_group(zeros),
        None if offsets is None else _by_group(offsets),
        run,
        -(-group // run),
        permutation,
        num_outputs,
        num_inputs,
    )


def _by_group(parameters: Tensor) -> Tensor:
    """[num_outputs, groups] to float32 [groups, num_outputs]."""
    return parameters.to(torch.float32).T.contiguous()


def _run_of(group: int, num_inputs: int) -> int:
    for run in RUNS:
        if group % run == 0 or group == num_inputs:
            return run
    raise ValueError(f"group_size = {group}: on a GPU it must be a multiple of {RUNS[-1]}, or all inputs")
