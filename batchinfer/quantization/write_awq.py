"""Weights in AutoAWQ's `gemm` layout. Called by conversion/. Source: AutoAWQ's awq/modules/linear/gemm.py."""

from typing import Any

import torch
from torch import Tensor

from batchinfer.kernels.quantized_linear.stored import IntegerWeight
from batchinfer.quantization.write_words import pack

_PLACES = (0, 2, 4, 6, 1, 3, 5, 7)  # which of 8 neighbouring outputs nibble i holds
WORD_OUTPUTS = len(_PLACES)


def awq_tensors(weight: IntegerWeight) -> dict[str, Tensor]:
    """qweight int32 [K, N / 8], qzeros int32 [G, N / 8], scales fp16 [G, N]. weight: 4 bits, with zeros, without a
    permutation; N a multiple of 8."""
    assert weight.bits == 4
    assert weight.zeros is not None
    assert weight.permutation is None
    return {
        "qweight": _pack_outputs(weight.values.T),
        "qzeros": _pack_outputs(weight.zeros.T.to(torch.uint8)),
        "scales": weight.scales.T.to(torch.float16).contiguous(),
    }


def awq_config(group_size: int) -> dict[str, Any]:
    """quantization_config of config.json. group_size: -1 for one group a row."""
    return {
        "quant_method": "awq",
        "version": "gemm",
        "bits": 4,
        "group_size": group_size,
        "zero_point": True,
        "modules_to_not_convert": None,
    }


def _pack_outputs(values: Tensor) -> Tensor:
    return pack(values.unflatten(-1, (-1, WORD_OUTPUTS))[..., list(_PLACES)].flatten(-2).contiguous(), 4)
