"""Weights in GPTQ's layout, version 1, where zero points are stored one too small. Called by conversion/. Source:
GPTQModel's nn_modules/qlinear."""

from typing import Any

import torch
from torch import Tensor

from batchinfer.kernels.quantized_linear.stored import IntegerWeight
from batchinfer.quantization.write_words import group_of_inputs, in_input_order, pack

LOWEST_ZERO = 1  # what is stored is one less and no field can be negative; readers disagree about the wrapped 0


def gptq_tensors(weight: IntegerWeight) -> dict[str, Tensor]:
    """qweight int32 [K * bits / 32, N], qzeros int32 [G, N * bits / 32], scales fp16 [G, N], g_idx int32 [K]. weight:
    with zeros of 1 or more; K * bits and N * bits multiples of 32."""
    assert weight.zeros is not None
    values = in_input_order(weight.values, weight.permutation)
    return {
        "qweight": pack(values.contiguous(), weight.bits).T.contiguous(),
        "qzeros": pack((weight.zeros.T - 1).to(torch.uint8).contiguous(), weight.bits),
        "scales": weight.scales.T.to(torch.float16).contiguous(),
        "g_idx": group_of_inputs(values.shape[1], weight.group_size, weight.permutation),
    }


def gptq_config(bits: int, group_size: int, symmetric: bool, act_order: bool, quantizer: str) -> dict[str, Any]:
    """quantization_config of config.json. group_size: -1 for one group a row. quantizer: name and version of what made
    the file."""
    return {
        "quant_method": "gptq",
        "checkpoint_format": "gptq",
        "bits": bits,
        "group_size": group_size,
        "sym": symmetric,
        "desc_act": act_order,
        "lm_head": False,
        "pack_dtype": "int32",
        "meta": {"quantizer": [quantizer]},
    }
