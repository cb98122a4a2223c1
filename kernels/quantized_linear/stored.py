"""Quantised weights as checkpoints mean them: small integers or fp8 with their scales, not yet in an order that suits a
processor. Made by readers and makers of checkpoints; `pack_weight` takes them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

BITS = (2, 3, 4, 8)
SCALE_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_ROWS_AT_ONCE = 1024  # bounds the float32 copies while dequantising


@dataclass(frozen=True, slots=True)
class IntegerWeight:
    """A weight [N, K] of `bits`-bit integers, with a scale for each `group_size` consecutive columns of `values`; G =
    ceil(K / group_size), so that the last group may be shorter.

    values: uint8 [N, K], from 0 to 2^bits - 1; scales: float [N, G]; either zeros: float32 [N, G] or offsets: float
    [N, G]; permutation: int64 [K], which input each column of `values` meets (None: the one of its own number). In
    float32, with g = j // group_size, w[n, permutation[j]] is (values[n, j] - zeros[n, g]) * scales[n, g], or
    values[n, j] * scales[n, g] + offsets[n, g].

    Raises ValueError, which names the field, where these do not fit together.
    """

    bits: int
    group_size: int
    values: Tensor
    scales: Tensor
    zeros: Tensor | None = None
    offsets: Tensor | None = None
    permutation: Tensor | None = None

    def __post_init__(self) -> None:
        if self.bits not in BITS:
            raise ValueError(f"bits must be one of {BITS}, not {self.bits}")
        _check_matrix("values", self.values, (torch.uint8,))
        rows, columns = self.values.shape
        if not 1 <= self.group_size <= columns:
            raise ValueError(f"group_size must be from 1 to {columns}, the number of inputs, not {self.group_size}")
        if self.bits < 8 and int(self.values.max()) >= 2**self.bits:
            raise ValueError(f"values must be below {2**self.bits} with {self.bits} bits, not {int(self.values.max())}")
        shape = (rows, -(-columns // self.group_size))
        _check_matrix("scales", self.scales, SCALE_DTYPES, shape)
        if (self.zeros is None) == (self.offsets is None):
            raise ValueError("exactly one of zeros and offsets must be given")
        if self.zeros is not None:
            _check_matrix("zeros", self.zeros, (torch.float32,), shape)
        if self.offsets is not None:
            _check_matrix("offsets", self.offsets, SCALE_DTYPES, shape)
        if self.permutation is not None:
            _check_permutation(self.permutation, columns)

    @property
    def shape(self) -> tuple[int, int]:
        """N, K."""
        return self.values.shape[0], self.values.shape[1]

    @property
    def nbytes(self) -> int:
        tensors = (self.values, self.scales, self.zeros, self.offsets, self.permutation)
        return sum(tensor.nbytes for tensor in tensors if tensor is not None)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """[N, K] in the order of the inputs, computed in float32 and rounded once."""
        out = torch.empty(self.shape, dtype=dtype, device=self.values.device)
        for rows in _row_chunks(len(out)):
            weight = self.values[rows].to(torch.float32)
            if self.zeros is not None:
                weight = (weight - self._by_column(self.zeros[rows])) * self._by_column(self.scales[rows])
            elif self.offsets is not None:
                weight = weight * self._by_column(self.scales[rows]) + self._by_column(self.offsets[rows])
            if self.permutation is None:
                out[rows] = weight
            else:
                out[rows, self.permutation] = weight.to(dtype)
        return out

    def _by_column(self, of_groups: Tensor) -> Tensor:
        return _spread(of_groups, 1, self.group_size, self.shape[1])


@dataclass(frozen=True, slots=True)
class Fp8Weight:
    """A weight [N, K] of e4m3 numbers, which a grid of scales over blocks of `block` outputs and inputs multiplies in
    float32; blocks at the end of a side may be smaller.

    values: float8_e4m3fn [N, K] without NaN; scales: float32 [ceil(N / block[0]), ceil(K / block[1])]. A scale a tensor
    has the block (N, K), a scale a channel (1, K).

    Raises ValueError, which names the field, where these do not fit together.
    """

    values: Tensor
    scales: Tensor
    block: tuple[int, int]

    def __post_init__(self) -> None:
        _check_matrix("values", self.values, (torch.float8_e4m3fn,))
        if not all(1 <= side <= whole for side, whole in zip(self.block, self.shape, strict=True)):
            raise ValueError(f"block must be from (1, 1) to {self.shape}, the whole weight, not {self.block}")
        grid = tuple(-(-whole // side) for whole, side in zip(self.shape, self.block, strict=True))
        _check_matrix("scales", self.scales, (torch.float32,), grid)
        if bool(((self.values.view(torch.uint8) & 0x7F) == 0x7F).any()):
            raise ValueError("values must be numbers, but there is NaN among them")

    @property
    def shape(self) -> tuple[int, int]:
        """N, K."""
        return self.values.shape[0], self.values.shape[1]

    @property
    def nbytes(self) -> int:
        return self.values.nbytes + self.scales.nbytes

    def row_scales(self) -> Tensor:
        """float32 [N, ceil(K / block[1])]: the grid with a row for each output."""
        return _spread(self.scales, 0, self.block[0], self.shape[0])

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """[N, K], computed in float32 and rounded once."""
        scales = self.row_scales()
        out = torch.empty(self.shape, dtype=dtype, device=self.values.device)
        for rows in _row_chunks(len(out)):
            out[rows] = self.values[rows].to(torch.float32) * _spread(scales[rows], 1, self.block[1], self.shape[1])
        return out


StoredWeight = TypeVar("StoredWeight", IntegerWeight, Fp8Weight)


def concatenate(weights: Sequence[StoredWeight]) -> StoredWeight:
    """One weight with the rows of all, in their order; each keeps its exact numbers. Raises ValueError, which names the
    field, where they are of different kinds, bits, groups or permutations."""
    first = weights[0]
    for other in weights[1:]:
        if type(other) is not type(first):
            raise ValueError(f"cannot stack {type(first).__name__} and {type(other).__name__}")
        if other.shape[1] != first.shape[1]:
            raise ValueError(f"cannot stack values of {first.shape[1]} and {other.shape[1]} inputs")
    if isinstance(first, IntegerWeight):
        return _stack_integers(weights)
    return _stack_fp8(weights)


def _stack_integers(weights: Sequence[IntegerWeight]) -> IntegerWeight:
    first = weights[0]
    for other in weights[1:]:
        for name in ("bits", "group_size"):
            if getattr(other, name) != getattr(first, name):
                raise ValueError(f"cannot stack weights of {name} {getattr(first, name)} and {getattr(other, name)}")
        if (other.zeros is None) != (first.zeros is None):
            raise ValueError("cannot stack a weight with zeros and one with offsets")
        if not _same(first.permutation, other.permutation):
            raise ValueError("cannot stack weights of different permutation")
    return IntegerWeight(
        first.bits,
        first.group_size,
        torch.cat([weight.values for weight in weights]),
        torch.cat([weight.scales for weight in weights]),
        None if first.zeros is None else torch.cat([weight.zeros for weight in weights if weight.zeros is not None]),
        None if first.offsets is None else torch.cat([w.offsets for w in weights if w.offsets is not None]),
        first.permutation,
    )


def _stack_fp8(weights: Sequence[Fp8Weight]) -> Fp8Weight:
    first = weights[0]
    for other in weights[1:]:
        if other.block[1] != first.block[1]:
            raise ValueError(f"cannot stack weights of block {first.block} and {other.block}")
    height = first.block[0]
    is_one_grid = all(w.block[0] == height for w in weights) and all(w.shape[0] % height == 0 for w in weights[:-1])
    # torch has no concatenation of fp8
    values = torch.cat([weight.values.view(torch.uint8) for weight in weights]).view(torch.float8_e4m3fn)
    scales = torch.cat([weight.scales if is_one_grid else weight.row_scales() for weight in weights])
    return Fp8Weight(values, scales, (height if is_one_grid else 1, first.block[1]))


def _same(a: Tensor | None, b: Tensor | None) -> bool:
    return a is b or (a is not None and b is not None and torch.equal(a, b))


def _spread(of_blocks: Tensor, dim: int, block: int, length: int) -> Tensor:
    """Each block's value for each of its members, float32; `length` is the number of members in all."""
    if of_blocks.shape[dim] == length:
        return of_blocks.to(torch.float32)
    return of_blocks.to(torch.float32).repeat_interleave(block, dim=dim).narrow(dim, 0, length)


def _row_chunks(num_rows: int) -> list[slice]:
    return [slice(first, first + _ROWS_AT_ONCE) for first in range(0, num_rows, _ROWS_AT_ONCE)]


def _check_matrix(
    name: str, tensor: Tensor, dtypes: Sequence[torch.dtype], shape: tuple[int, ...] | None = None
) -> None:
    if tensor.dtype not in dtypes:
        allowed = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise ValueError(f"{name} must be {allowed}, not {str(tensor.dtype).removeprefix('torch.')}")
    if shape is not None and tensor.shape != shape:
        raise ValueError(f"{name} must be {list(shape)}, not {list(tensor.shape)}")
    if tensor.ndim != 2 or tensor.numel() == 0:
        raise ValueError(f"{name} must be a matrix, not {list(tensor.shape)}")


def _check_permutation(permutation: Tensor, columns: int) -> None:
    if permutation.dtype != torch.int64 or permutation.shape != (columns,):
        raise ValueError(
            f"permutation must be int64 [{columns}], not {str(permutation.dtype).removeprefix('torch.')} "
            f"{list(permutation.shape)}"
        )
    expected = torch.arange(columns, device=permutation.device)
    if not torch.equal(permutation.sort().values, expected):
        raise ValueError(f"permutation must hold each number from 0 to {columns - 1} once")
