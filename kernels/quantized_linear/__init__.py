"""Linear layers of quantised weights. Called by the models' linear layers.

quantize_weight and quantized_linear run products in 8 bits: int8 weights made at load, activations quantised on the
fly. pack_weight and packed_linear keep a checkpoint's own 4- or 8-bit numbers, or bf16, in memory and run products in
the activations' format. pack_fp8_weight and fp8_linear run products in e4m3, of 4-bit numbers too. gated_linear is one
of the first two and the activation that follows.
"""

import torch
from batchinfer.kernels.gated_activation import ActivationKind, gated_activation
from batchinfer.kernels.quantized_linear import cpu, fp8, packed, reference
from batchinfer.kernels.quantized_linear.gpu_weight import GpuWeight, Int8GpuWeight
from batchinfer.kernels.quantized_linear.packed import PackedWeight
from batchinfer.kernels.quantized_linear.stored import Fp8Weight, IntegerWeight, concatenate
from batchinfer.kernels.quantized_linear.weight import QuantizedWeight

__all__ = [
    "Fp8Weight",
    "GpuWeight",
    "Int8GpuWeight",
    "IntegerWeight",
    "PackedWeight",
    "QuantizedWeight",
    "can_pack_bf16",
    "check_fp8_device",
    "concatenate",
    "fp8_linear",
    "gated_linear",
    "pack_fp8_weight",
    "pack_weight",
    "packed_linear",
    "quantize_weight",
    "quantized_linear",
]

_HOST_WEIGHTS = PackedWeight | QuantizedWeight


def quantize_weight(weight: torch.Tensor, is_gated: bool = False) -> QuantizedWeight | Int8GpuWeight:
    """weight: [num_outputs, num_inputs], bf16, fp16 or fp32. Symmetric: the largest magnitude of each group of 192
    inputs of an output becomes 127. is_gated: as pack_weight's.

    Before that a Walsh-Hadamard transform, which is orthogonal, rotates each 64 inputs of weight and activations alike:
    it leaves products as they are and spreads outliers over the 64 (QuaRot, arXiv 2404.00456).
    """
    if weight.is_cuda:
        from batchinfer.kernels.quantized_linear import gpu  # here, as it brings Triton

        return gpu.quantize_weight(weight)
    backend = cpu if cpu.can_run(weight) else reference
    return backend.quantize_weight(weight, is_gated)


def quantized_linear(
    x: torch.Tensor,
    weight: QuantizedWeight | Int8GpuWeight,
    bias: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """x W^T + b with 8-bit operands, integer sums, and float32 beyond them.

    x: [n, num_inputs], bf16, fp16 or fp32; bias: float32 [num_outputs]; out: dense [n, num_outputs] of one of these
    dtypes, filled and returned; None makes one of x's dtype. Each group of 192 inputs of a row is quantised by a scale
    of its own (its largest magnitude / 127), so that a row's result does not depend on other rows.
    """
    out = _checked_out(x, weight, bias, out)
    if isinstance(weight, Int8GpuWeight):
        from batchinfer.kernels.quantized_linear import gpu  # here, as it brings Triton

        gpu.quantized_linear(x, weight, bias, out)
        return out
    backend = cpu if cpu.can_run(x) else reference
    backend.quantized_linear(x, weight, bias, out)
    return out


def can_pack_bf16(weight: torch.Tensor) -> bool:
    """Whether packed_linear multiplies this weight, as it is, by instructions for bf16: no slower than torch's product,
    and with float32 results where they are asked for."""
    return weight.dtype == torch.bfloat16 and cpu.can_run(weight) and cpu.has_bf16_products()


def pack_weight(weight: IntegerWeight | Fp8Weight | torch.Tensor, is_gated: bool = False) -> PackedWeight | GpuWeight:
    """The form that packed_linear reads, where the weight is: 2 numbers a byte up to 4 bits, one a byte with 8 bits and
    fp8, and two bytes a number from a bf16 tensor [N, K], which loses nothing either. Raises ValueError on groups of
    other than whole 32 inputs on a GPU.

    is_gated: the outputs are those of a gate over those that it multiplies. On a CPU, and where their number is a
    multiple of 32, they are then stored in pairs (`is_paired`), which lets gated_linear run at once; nothing else
    shows it.
    """
    if not isinstance(weight, torch.Tensor) and weight.values.is_cuda:
        from batchinfer.kernels.quantized_linear import gpu  # here, as it brings Triton

        return gpu.pack_weight(weight)
    return packed.pack_weight(weight, is_gated)


def packed_linear(
    x: torch.Tensor, weight: PackedWeight | GpuWeight, bias: torch.Tensor | None = None, out: torch.Tensor | None = None
) -> torch.Tensor:
    """x W^T + b with W as the checkpoint means it, rounded from float32 to x's dtype; products and sums are float32.

    x: [n, num_inputs], bf16, fp16 or fp32; bias: float32 [num_outputs]; out: dense [n, num_outputs] of one of these
    dtypes, filled and returned; None makes one of x's dtype. A row's result does not depend on other rows, nor on
    how many there are, where the native code runs.
    """
    out = _checked_out(x, weight, bias, out)
    if isinstance(weight, GpuWeight):
        from batchinfer.kernels.quantized_linear import gpu  # here, as it brings Triton

        gpu.packed_linear(x, weight, bias, out)
        return out
    backend = cpu if cpu.can_run(x) else reference
    backend.packed_linear(x, weight, bias, out)
    return out


def gated_linear(
    x: torch.Tensor,
    weight: PackedWeight | QuantizedWeight | GpuWeight | Int8GpuWeight,
    bias: torch.Tensor | None,
    kind: ActivationKind,
) -> torch.Tensor:
    """act(gate) * up of packed_linear's or quantized_linear's outputs, the gate in the first half. The bits are those
    of gated_activation after the product; with a paired weight on a CPU the outputs never go through memory.

    Returns [n, num_outputs / 2] of x's dtype.

    Other arguments as theirs; kind as gated_activation's.
    """
    if isinstance(weight, _HOST_WEIGHTS) and weight.is_paired and cpu.can_gate(x, kind):
        _check(x, weight, bias)
        out = x.new_empty(x.shape[0], weight.num_outputs // 2)
        cpu.gated_linear(x, weight, bias, kind, out)
        return out
    if isinstance(weight, PackedWeight | GpuWeight):
        return gated_activation(packed_linear(x, weight, bias), kind)
    return gated_activation(quantized_linear(x, weight, bias), kind)


def check_fp8_device(device: torch.device) -> None:
    """Raises ValueError where fp8_linear does not run: a GPU whose matrix instructions take no e4m3."""
    if device.type == "cuda":
        from batchinfer.kernels.quantized_linear import gpu_fp8  # here, as it brings Triton

        gpu_fp8.check_device()


def pack_fp8_weight(weight: IntegerWeight | Fp8Weight | torch.Tensor) -> PackedWeight | GpuWeight:
    """The form that fp8_linear reads, where the weight is. Numbers of up to 4 bits and fp8 stay what they are; others,
    and a tensor [N, K] of bf16, fp16 or fp32, become e4m3 with a scale an output, its largest magnitude / 448.

    Raises ValueError on groups of other than whole 32 inputs on a GPU.
    """
    return fp8.pack_fp8_weight(weight)


def fp8_linear(
    x: torch.Tensor, weight: PackedWeight | GpuWeight, bias: torch.Tensor | None = None, out: torch.Tensor | None = None
) -> torch.Tensor:
    """x W^T + b with operands in e4m3: of x with a scale a token, its largest magnitude / 448; of W the numbers that
    the checkpoint has, less their zeros, whose scales multiply each group's sum. Sums are float32 from groups (at least
    each 128 inputs) on. A CPU computes the same in float32.

    Arguments as packed_linear's. A token with NaN or infinity has NaN results.
    """
    out = _checked_out(x, weight, bias, out)
    if isinstance(weight, GpuWeight):
        from batchinfer.kernels.quantized_linear import gpu  # here, as it brings Triton

        gpu.fp8_linear(x, weight, bias, out)
        return out
    backend = cpu if cpu.can_run(x) else reference
    backend.fp8_linear(x, weight, bias, out)
    return out


def _checked_out(
    x: torch.Tensor,
    weight: QuantizedWeight | Int8GpuWeight | PackedWeight | GpuWeight,
    bias: torch.Tensor | None,
    out: torch.Tensor | None,
) -> torch.Tensor:
    _check(x, weight, bias)
    shape = (x.shape[0], weight.num_outputs)
    if out is None:
        return x.new_empty(shape)
    if out.shape != shape or not out.is_contiguous():
        raise ValueError(f"out must be dense {shape}, not {tuple(out.shape)}")
    return out


def _check(
    x: torch.Tensor,
    weight: QuantizedWeight | Int8GpuWeight | PackedWeight | GpuWeight,
    bias: torch.Tensor | None,
) -> None:
    if x.ndim != 2 or x.shape[1] != weight.num_inputs:
        raise ValueError(f"x {tuple(x.shape)} does not fit a weight of {weight.num_inputs} inputs")
    if bias is not None and (bias.dtype != torch.float32 or bias.shape != (weight.num_outputs,)):
        raise ValueError(f"bias must be float32 [{weight.num_outputs}], not {bias.dtype} {tuple(bias.shape)}")
