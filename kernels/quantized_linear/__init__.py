"""Linear layers whose products run in 8 bits: int8 weights made at load, activations quantised on the fly. Called by
the models' linear layers."""

import torch
from batchinfer.kernels.quantized_linear import cpu, reference
from batchinfer.kernels.quantized_linear.weight import QuantizedWeight

__all__ = ["QuantizedWeight", "quantize_weight", "quantized_linear"]


def quantize_weight(weight: torch.Tensor) -> QuantizedWeight:
    """weight: [num_outputs, num_inputs], bf16, fp16 or fp32. Symmetric: the largest magnitude of each group of 64
    inputs of an output becomes 127.

    Before that a Walsh-Hadamard transform, which is orthogonal, rotates each group of weight and activations alike: it
    leaves products as they are and spreads outliers over their group (QuaRot, arXiv 2404.00456).
    """
    backend = cpu if cpu.can_run(weight) else reference
    return backend.quantize_weight(weight)


def quantized_linear(
    x: torch.Tensor, weight: QuantizedWeight, bias: torch.Tensor | None = None, out: torch.Tensor | None = None
) -> torch.Tensor:
    """x W^T + b with 8-bit operands, integer sums, and float32 beyond them.

    x: [n, num_inputs], bf16, fp16 or fp32; bias: float32 [num_outputs]; out: dense [n, num_outputs] of one of these
    dtypes, filled and returned; None makes one of x's dtype. Each group of 64 inputs of a row is rotated and quantised
    by a scale of its own (its largest magnitude / 127), so that a row's result does not depend on other rows.
    """
    if x.ndim != 2 or x.shape[1] != weight.num_inputs:
        raise ValueError(f"x {tuple(x.shape)} does not fit a weight of {weight.num_inputs} inputs")
    shape = (len(x), weight.num_outputs)
    if out is None:
        out = torch.empty(shape, dtype=x.dtype, device=x.device)
    if out.shape != shape or not out.is_contiguous():
        raise ValueError(f"out must be dense {shape}, not {tuple(out.shape)}")
    if bias is not None and (bias.dtype != torch.float32 or bias.shape != shape[1:]):
        raise ValueError(f"bias must be float32 [{weight.num_outputs}], not {bias.dtype} {tuple(bias.shape)}")
    backend = cpu if cpu.can_run(x) else reference
    backend.quantized_linear(x, weight, bias, out)
    return out
