"""Native CPU backend of quantize_weight and quantized_linear."""

import ctypes
import functools
from collections.abc import Callable
from ctypes import c_int64, c_void_p

import torch
from batchinfer.kernels.common import native
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


@functools.cache
def _quantize() -> Callable[..., None]:
    return native.function("quantized_linear", "quantize_weight", c_void_p, c_int64, ctypes.POINTER(Weight), c_int64)


@functools.cache
def _run() -> Callable[..., None]:
    pointers = (c_void_p, c_int64, ctypes.POINTER(Weight), c_void_p)
    return native.function("quantized_linear", "quantized_linear", *pointers, c_int64, c_int64, c_int64)


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
