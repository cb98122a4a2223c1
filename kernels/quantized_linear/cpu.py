"""Native CPU backend of quantize_weight, quantized_linear, packed_linear and fp8_linear."""

import ctypes
import functools
from collections.abc import Callable
from ctypes import c_int64, c_void_p

import torch
from batchinfer.kernels.common import native
from batchinfer.kernels.quantized_linear import reference
from batchinfer.kernels.quantized_linear.packed import PackedWeight
from batchinfer.kernels.quantized_linear.weight import QuantizedWeight


class Weight(ctypes.Structure):
    """As in cpu.cpp."""

    _fields_ = (
        *((name, c_void_p) for name in ("values", "scales", "offsets", "bias")),
        *((name, c_int64) for name in ("num_inputs", "num_outputs", "num_groups")),
    )

    @classmethod
    def of(cls, weight: QuantizedWeight, bias: torch.Tensor | None) -> "Weight":
        tensors = (weight.values, weight.scales, weight.offsets, bias)
        sizes = (weight.num_inputs, weight.num_outputs, weight.scales.shape[1])
        return cls(*(native.address(tensor) for tensor in tensors), *sizes)


class Packed(ctypes.Structure):
    """As in unpack.h."""

    _fields_ = (
        *((name, c_void_p) for name in ("values", "parameters", "inputs", "bias")),
        *((name, c_int64) for name in ("kind", "has_fp32_parameters", "has_offsets")),
        *((name, c_int64) for name in ("steps", "group_steps", "num_outputs", "num_inputs")),
    )

    @classmethod
    def of(cls, weight: PackedWeight, bias: torch.Tensor | None) -> "Packed":
        parameters = weight.parameters
        has_fp32_parameters = parameters is not None and parameters.dtype == torch.float32
        return cls(
            *(native.address(tensor) for tensor in (weight.values, parameters, weight.inputs, bias)),
            *(weight.kind, has_fp32_parameters, weight.has_offsets),
            *(weight.values.shape[1], weight.group_steps, weight.num_outputs, weight.num_inputs),
        )


@functools.cache
def _quantize() -> Callable[..., None]:
    return native.function("quantized_linear", "quantize_weight", c_void_p, c_int64, ctypes.POINTER(Weight), c_int64)


@functools.cache
def _run() -> Callable[..., None]:
    pointers = (c_void_p, c_int64, ctypes.POINTER(Weight), c_void_p)
    return native.function("quantized_linear", "quantized_linear", *pointers, c_int64, c_int64, c_int64)


@functools.cache
def _run_packed() -> Callable[..., None]:
    pointers = (c_void_p, c_int64, ctypes.POINTER(Packed), c_void_p)
    return native.function("quantized_linear", "packed_linear", *pointers, c_int64, c_int64, c_int64)


@functools.cache
def has_bf16_products() -> bool:
    """Whether packed_linear multiplies bf16 by instructions for it; where native code runs at all."""
    result = c_int64()
    native.function("quantized_linear", "has_bf16_products", ctypes.POINTER(c_int64))(ctypes.byref(result))
    return bool(result.value)


def can_run(x: torch.Tensor) -> bool:
    return native.can_run("quantized_linear", x)


def quantize_weight(weight: torch.Tensor) -> QuantizedWeight:
    """See the package's `quantize_weight`."""
    weight = weight.contiguous()
    packed = QuantizedWeight.empty(*weight.shape, weight.device)
    filled = ctypes.byref(Weight.of(packed, None))
    _quantize()(weight.data_ptr(), native.FORMATS[weight.dtype], filled, torch.get_num_threads())
    return packed


def quantized_linear(x: torch.Tensor, weight: QuantizedWeight, bias: torch.Tensor | None, out: torch.Tensor) -> None:
    """See the package's `quantized_linear`."""
    x = x.contiguous()
    _run()(
        *(x.data_ptr(), len(x), ctypes.byref(Weight.of(weight, bias)), out.data_ptr()),
        *(native.FORMATS[x.dtype], native.FORMATS[out.dtype], torch.get_num_threads()),
    )


def packed_linear(x: torch.Tensor, weight: PackedWeight, bias: torch.Tensor | None, out: torch.Tensor) -> None:
    """See the package's `packed_linear`."""
    x = x.contiguous()
    _run_packed()(
        *(x.data_ptr(), len(x), ctypes.byref(Packed.of(weight, bias)), out.data_ptr()),
        *(native.FORMATS[x.dtype], native.FORMATS[out.dtype], torch.get_num_threads()),
    )


def fp8_linear(x: torch.Tensor, weight: PackedWeight, bias: torch.Tensor | None, out: torch.Tensor) -> None:
    """See the package's `fp8_linear`: the products run in float32, which shows what e4m3 does to results."""
    reference.fp8_linear(x, weight, bias, out, packed_linear)
