"""Native CPU backend of quantize_weight, quantized_linear, packed_linear, fp8_linear and gated_linear."""

import ctypes
import functools
from collections.abc import Callable
from ctypes import c_int64, c_void_p

import torch
from batchinfer.kernels.common import native
from batchinfer.kernels.gated_activation.cpu import GATES
from batchinfer.kernels.quantized_linear import reference
from batchinfer.kernels.quantized_linear.packed import PackedWeight
from batchinfer.kernels.quantized_linear.weight import QuantizedWeight, can_pair, pair_halves

_NO_GATE = -1  # as in gate.h


class Weight(ctypes.Structure):
    """As in int8.h."""

    _fields_ = (
        *((name, c_void_p) for name in ("values", "scales", "offsets", "bias")),
        *((name, c_int64) for name in ("num_inputs", "num_outputs", "num_groups", "is_paired")),
    )

    @classmethod
    def of(cls, weight: QuantizedWeight, bias: torch.Tensor | None) -> "Weight":
        tensors = (weight.values, weight.scales, weight.offsets, bias)
        sizes = (weight.num_inputs, weight.num_outputs, weight.scales.shape[1], weight.is_paired)
        return cls(*(native.address(tensor) for tensor in tensors), *sizes)


class Packed(ctypes.Structure):
    """As in unpack.h."""

    _fields_ = (
        *((name, c_void_p) for name in ("values", "parameters", "inputs", "bias")),
        *((name, c_int64) for name in ("kind", "has_fp32_parameters", "has_offsets")),
        *((name, c_int64) for name in ("steps", "group_steps", "num_outputs", "num_inputs", "is_paired")),
    )

    @classmethod
    def of(cls, weight: PackedWeight, bias: torch.Tensor | None) -> "Packed":
        parameters = weight.parameters
        has_fp32_parameters = parameters is not None and parameters.dtype == torch.float32
        return cls(
            *(native.address(tensor) for tensor in (weight.values, parameters, weight.inputs, bias)),
            *(weight.kind, has_fp32_parameters, weight.has_offsets),
            *(weight.values.shape[1], weight.group_steps, weight.num_outputs, weight.num_inputs, weight.is_paired),
        )


@functools.cache
def _quantize() -> Callable[..., None]:
    return native.function("quantized_linear", "quantize_weight", c_void_p, c_int64, ctypes.POINTER(Weight), c_int64)


@functools.cache
def _run() -> Callable[..., None]:
    pointers = (c_void_p, c_int64, ctypes.POINTER(Weight), c_void_p)
    return native.function("quantized_linear", "quantized_linear", *pointers, *[c_int64] * 4)


@functools.cache
def _run_packed() -> Callable[..., None]:
    pointers = (c_void_p, c_int64, ctypes.POINTER(Packed), c_void_p)
    return native.function("quantized_linear", "packed_linear", *pointers, *[c_int64] * 4)


@functools.cache
def has_bf16_products() -> bool:
    """Whether packed_linear multiplies bf16 by instructions for it; where native code runs at all."""
    result = c_int64()
    native.function("quantized_linear", "has_bf16_products", ctypes.POINTER(c_int64))(ctypes.byref(result))
    return bool(result.value)


def can_run(x: torch.Tensor) -> bool:
    return native.can_run("quantized_linear", x)


def can_gate(x: torch.Tensor, kind: str) -> bool:
    """Whether gated_linear runs, of a paired weight."""
    return kind in GATES and can_run(x)


def quantize_weight(weight: torch.Tensor, is_gated: bool = False) -> QuantizedWeight:
    """See the package's `quantize_weight`."""
    is_paired = is_gated and can_pair(len(weight))
    rows = pair_halves(weight) if is_paired else weight.contiguous()
    packed = QuantizedWeight.empty(*weight.shape, weight.device, is_paired)
    filled = ctypes.byref(Weight.of(packed, None))
    _quantize()(rows.data_ptr(), native.FORMATS[weight.dtype], filled, torch.get_num_threads())
    return packed


def quantized_linear(x: torch.Tensor, weight: QuantizedWeight, bias: torch.Tensor | None, out: torch.Tensor) -> None:
    """See the package's `quantized_linear`."""
    _product(x, weight, bias, out, _NO_GATE)


def packed_linear(x: torch.Tensor, weight: PackedWeight, bias: torch.Tensor | None, out: torch.Tensor) -> None:
    """See the package's `packed_linear`."""
    _product(x, weight, bias, out, _NO_GATE)


def gated_linear(
    x: torch.Tensor, weight: PackedWeight | QuantizedWeight, bias: torch.Tensor | None, kind: str, out: torch.Tensor
) -> None:
    """See the package's `gated_linear`; the weight is paired, and out of x's dtype."""
    _product(x, weight, bias, out, GATES[kind])


def _product(
    x: torch.Tensor, weight: PackedWeight | QuantizedWeight, bias: torch.Tensor | None, out: torch.Tensor, gate: int
) -> None:
    x = x.contiguous()
    if not weight.native or weight.native[0] is not bias:
        form = Packed.of(weight, bias) if isinstance(weight, PackedWeight) else Weight.of(weight, bias)
        weight.native[:] = bias, ctypes.byref(form)
    run = _run_packed() if isinstance(weight, PackedWeight) else _run()
    run(
        *(x.data_ptr(), x.shape[0], weight.native[1], out.data_ptr()),
        *(native.FORMATS[x.dtype], native.FORMATS[out.dtype], gate, torch.get_num_threads()),
    )


def fp8_linear(x: torch.Tensor, weight: PackedWeight, bias: torch.Tensor | None, out: torch.Tensor) -> None:
    """See the package's `fp8_linear`: the products run in float32, which shows what e4m3 does to results."""
    reference.fp8_linear(x, weight, bias, out, packed_linear)
