"""Weights and KV scales in the layouts of compressed-tensors: pack-quantized integers and float-quantized fp8. Called
by conversion/. Source: compressed-tensors' compressors and quantization schemes."""

from typing import Any

import torch
from torch import Tensor

from batchinfer.kernels.quantized_linear.stored import Fp8Weight, IntegerWeight
from batchinfer.quantization.write_words import pack


def packed_tensors(weight: IntegerWeight, symmetric: bool, scale_dtype: torch.dtype) -> dict[str, Tensor]:
    """weight_packed int32 [N, K * bits / 32], weight_scale [N, G], weight_shape int64 [2]; asymmetric also
    weight_zero_point int32 [N * bits / 32, G]. Sizes round up. weight: with its groups in the order of the inputs, as
    readers since compressed-tensors 0.19 know no other."""
    assert weight.zeros is not None
    assert weight.permutation is None
    tensors = {
        "weight_packed": pack(weight.values, weight.bits),
        "weight_scale": weight.scales.to(scale_dtype).contiguous(),
        "weight_shape": torch.tensor(weight.shape, dtype=torch.int64),
    }
    if not symmetric:
        zeros = weight.zeros.T.to(torch.uint8).contiguous()
        tensors["weight_zero_point"] = pack(zeros, weight.bits).T.contiguous()
    return tensors


def fp8_tensors(weight: Fp8Weight, scale_dtype: torch.dtype) -> dict[str, Tensor]:
    """weight e4m3 [N, K] and weight_scale [N, 1]. weight: a scale a channel."""
    assert weight.block == (1, weight.shape[1])
    return {"weight": weight.values, "weight_scale": weight.scales.to(scale_dtype)}


def packed_config(bits: int, group_size: int, symmetric: bool) -> dict[str, Any]:
    """quantization_config of config.json. group_size: -1 for one group a row."""
    weights = {
        **_arguments(bits, "int", "channel" if group_size == -1 else "group", dynamic=False, symmetric=symmetric),
        "group_size": None if group_size == -1 else group_size,
    }
    return _config("pack-quantized", weights, None)


def fp8_config() -> dict[str, Any]:
    """quantization_config of config.json: weights by channel; readers quantise activations by token as they run."""
    weights = _arguments(8, "float", "channel", dynamic=False)
    return _config("float-quantized", weights, _arguments(8, "float", "token", dynamic=True))


def with_kv_scales(config: dict[str, Any]) -> dict[str, Any]:
    return {**config, "kv_cache_scheme": _arguments(8, "float", "tensor", dynamic=False)}


def kv_scale_tensors(prefix: str, key_scale: float, value_scale: float, scale_dtype: torch.dtype) -> dict[str, Tensor]:
    """prefix: of the attention block, with its dot. A key is its fp8 code times key_scale."""
    scales = {"k_scale": key_scale, "v_scale": value_scale}
    return {prefix + name: torch.tensor([scale], dtype=scale_dtype) for name, scale in scales.items()}


def _config(layout: str, weights: dict[str, Any], activations: dict[str, Any] | None) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "quantization_status": "compressed",
        "config_groups": {"group_0": {**group, "format": layout}},
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "global_compression_ratio": None,
    }


def _arguments(bits: int, kind: str, strategy: str, *, dynamic: bool, symmetric: bool = True) -> dict[str, Any]:
    return {
        "num_bits": bits,
        "type": kind,
        "strategy": strategy,
        "symmetric": symmetric,
        "dynamic": dynamic,
        "group_size": None,
        "actorder": None,
        "block_structure": None,
    }
