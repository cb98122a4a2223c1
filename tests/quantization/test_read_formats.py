"""Each format's reader gives the exact numbers that were written, bit for bit in float32."""

import gguf
import numpy as np
import pytest
import torch
from gguf.quants import dequantize as gguf_dequantize
from written_formats import (
    TensorDict,
    awq_gemm,
    awq_gemv,
    awq_gemv_fast,
    compressed_tensors,
    dequantize,
    gptq,
    random_e4m3,
    random_layer,
)

from batchinfer.errors import BatchInferError
from batchinfer.quantization.config import parse
from batchinfer.quantization.read_gguf import BLOCK_TYPES, decode_blocks
from batchinfer.quantization.tensors import ModuleTensors

MODULE = "model.layers.3.mlp.down_proj"


def read(config, tensors, num_outputs, num_inputs, module=MODULE):
    """The layer's weight, every tensor of it used."""
    source = TensorDict({f"{module}.{name}": tensor for name, tensor in tensors.items()})
    unused = set(source)
    layer = ModuleTensors(source, module, unused, torch.device("cpu"))
    scheme = parse(config, "config.json")
    assert scheme.is_quantized(layer)
    weight = scheme.read(layer, num_outputs, num_inputs)
    assert not unused
    return weight


def groups_in_order(num_inputs, group):
    return [k // group for k in range(num_inputs)]


AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": False}


@pytest.mark.parametrize(("num_outputs", "num_inputs", "group"), [(40, 96, 32), (8, 64, 64), (24, 128, -1)])
def test_awq_gemm(num_outputs, num_inputs, group):
    size = num_inputs if group == -1 else group
    values, scales, zeros = random_layer(num_outputs, num_inputs, 4, size)
    weight = read(AWQ | {"group_size": group}, awq_gemm(values, scales, zeros), num_outputs, num_inputs)
    expected = dequantize(values, scales, zeros, groups_in_order(num_inputs, size))
    assert torch.equal(weight.dequantize(), expected)
    assert weight.bits == 4


def test_awq_nibbles_are_in_their_order():
    """One word whose nibbles are 0 to 7: outputs 0, 2, 4, 6, 1, 3, 5, 7 get them in turn."""
    tensors = {
        "qweight": torch.tensor([[0x76543210]], dtype=torch.int32),
        "qzeros": torch.zeros(1, 1, dtype=torch.int32),
        "scales": torch.ones(1, 8, dtype=torch.float16),
    }
    weight = read(AWQ | {"group_size": -1}, tensors, 8, 1)
    assert weight.dequantize().flatten().tolist() == [0, 4, 1, 5, 2, 6, 3, 7]


@pytest.mark.parametrize("zero", [0, 15])
def test_extreme_zero_points_are_as_stored(zero):
    values, scales, zeros = random_layer(16, 64, 4, 32)
    zeros = torch.full_like(zeros, zero)
    weight = read(AWQ, awq_gemm(values, scales, zeros), 16, 64)
    assert torch.equal(weight.dequantize(), dequantize(values, scales, zeros, groups_in_order(64, 32)))
    assert weight.dequantize().isfinite().all()


@pytest.mark.parametrize("config", [{"version": "gemv"}, {"backend": "llm-awq", "version": None}])
def test_awq_gemv_pads_its_groups(config):
    values, scales, zeros = random_layer(12, 96, 4, 32)
    weight = read(AWQ | config, awq_gemv(values, scales, zeros, 32), 12, 96)
    assert torch.equal(weight.dequantize(), dequantize(values, scales, zeros, groups_in_order(96, 32)))


@pytest.mark.parametrize("name", ["qzeros", "scaled_zeros"])
def test_awq_gemv_fast_adds_products_of_scale_and_zero(name):
    values, scales, zeros = random_layer(12, 192, 4, 64)
    tensors = awq_gemv_fast(values, scales, zeros, 16)
    tensors[name] = tensors.pop("qzeros")
    version = {"version": "gemv_fast"} if name == "qzeros" else {"backend": "llm-awq"}
    weight = read(AWQ | {"group_size": 64} | version, tensors, 12, 192)
    offsets = tensors[name].T.float()
    expected = torch.stack(
        [values[:, k].float() * scales[:, k // 64].float() + offsets[:, k // 64] for k in range(192)], dim=1
    )
    assert torch.equal(weight.dequantize(), expected)


def test_old_awq_config_has_its_own_spelling():
    values, scales, zeros = random_layer(16, 64, 4, 64)
    config = {"zero_point": True, "q_group_size": 64, "w_bit": 4, "version": "GEMM"}
    weight = read(config, awq_gemm(values, scales, zeros), 16, 64)
    assert torch.equal(weight.dequantize(), dequantize(values, scales, zeros, groups_in_order(64, 64)))


@pytest.mark.parametrize("form", ["gptq", "gptq_v2"])
@pytest.mark.parametrize("group", [32, 64, -1])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_gptq(bits, group, form):
    num_outputs, num_inputs = 32, 96
    size = num_inputs if group == -1 else group  # groups of 64 leave one of 32
    values, scales, zeros = random_layer(num_outputs, num_inputs, bits, size)
    order = groups_in_order(num_inputs, size)
    tensors = gptq(values, scales, zeros, bits, order, v1=form == "gptq")
    config = GPTQ | {"bits": bits, "group_size": group, "checkpoint_format": form}
    weight = read(config, tensors, num_outputs, num_inputs)
    assert torch.equal(weight.dequantize(), dequantize(values, scales, zeros, order))
    assert (weight.bits, weight.permutation) == (bits, None)


@pytest.mark.parametrize("bits", [3, 4])
def test_gptq_in_the_order_of_activations(bits):
    values, scales, zeros = random_layer(32, 96, bits, 32)
    order = [groups_in_order(96, 32)[k] for k in torch.randperm(96, generator=torch.Generator().manual_seed(5))]
    config = GPTQ | {"bits": bits, "desc_act": True, "format": "gptq_v2"}
    weight = read(config, gptq(values, scales, zeros, bits, order), 32, 96)
    assert torch.equal(weight.dequantize(), dequantize(values, scales, zeros, order))
    assert weight.permutation is not None


def test_symmetric_gptq_v1_is_sevens():
    values, scales, zeros = random_layer(16, 32, 4, 32)
    zeros = torch.full_like(zeros, 8)
    tensors = gptq(values, scales, zeros, 4, [0] * 32, v1=True)
    assert set(tensors["qzeros"].flatten().tolist()) == {0x77777777}
    weight = read(GPTQ | {"sym": True}, tensors, 16, 32)
    assert torch.equal(weight.dequantize(), dequantize(values, scales, zeros, [0] * 32))


def test_gptq_zero_point_that_borrowed_from_its_neighbour():
    """GPTQModel takes 0x11111111 from whole words: a zero point of 0 borrows; adding to whole words gives it back."""
    values, scales, zeros = random_layer(8, 32, 4, 32)
    zeros[:, 0] = torch.tensor([0, 0, 7, 0, 1, 15, 0, 3])
    tensors = gptq(values, scales, zeros, 4, [0] * 32)
    tensors["qzeros"] = tensors["qzeros"] - 0x11111111
    weight = read(GPTQ | {"meta": {"quantizer": ["gptqmodel:7.7.0"]}}, tensors, 8, 32)
    assert torch.equal(weight.dequantize(), dequantize(values, scales, zeros, [0] * 32))


def test_gptq_rules_for_single_layers():
    values, scales, zeros = random_layer(32, 96, 8, 96)
    config = GPTQ | {
        "format": "gptq_v2",
        "dynamic": {r"-:lm_head": {}, r"+:.*\.down_proj": {"bits": 8, "group_size": -1}},
    }
    weight = read(config, gptq(values, scales, zeros, 8, [0] * 96), 32, 96)
    assert torch.equal(weight.dequantize(), dequantize(values, scales, zeros, [0] * 96))
    other = random_layer(32, 96, 4, 32)
    order = groups_in_order(96, 32)
    weight = read(config, gptq(*other, 4, order), 32, 96, "model.layers.0.self_attn.q_proj")
    assert torch.equal(weight.dequantize(), dequantize(*other, order))


AUTO_ROUND = {"quant_method": "auto-round", "bits": 4, "group_size": 32, "sym": True, "data_type": "int"}


@pytest.mark.parametrize(
    ("packing", "v1"),
    [
        ({}, True),
        ({"packing_format": "auto_round:auto_gptq"}, True),
        ({"backend": "auto_round:gptq:exllamav2"}, True),
        ({"packing_format": "auto_round:gptqmodel"}, False),
        ({"packing_format": "auto_round"}, False),
    ],
)
def test_auto_round_in_the_layouts_of_gptq(packing, v1):
    """Full names go before patterns: one of the layers that a pattern sets to 2 bits has 8."""
    config = AUTO_ROUND | packing
    config["extra_config"] = {
        ".*layers\\.1?3\\.mlp.*": {"bits": 2},
        MODULE: {"bits": 8, "group_size": -1},
        "lm_head": {"bits": 16, "data_type": "float"},
    }
    names = (MODULE, MODULE.replace("layers.3", "layers.13"), MODULE.replace("layers.3", "layers.23"))
    for module, bits, group in zip(names, (8, 2, 4), (96, 32, 32), strict=True):
        values, scales, zeros = random_layer(32, 96, bits, group)
        order = groups_in_order(96, group)
        tensors = gptq(values, scales, zeros, bits, order, v1=v1)
        del tensors["g_idx"]
        weight = read(config, tensors, 32, 96, module)
        assert torch.equal(weight.dequantize(), dequantize(values, scales, zeros, order))


def test_auto_round_in_the_layout_of_awq():
    values, scales, zeros = random_layer(16, 64, 4, 32)
    config = AUTO_ROUND | {"quant_method": "intel/auto-round", "packing_format": "auto_round:auto_awq"}
    weight = read(config, awq_gemm(values, scales, zeros), 16, 64)
    assert torch.equal(weight.dequantize(), dequantize(values, scales, zeros, groups_in_order(64, 32)))
    config |= {"extra_config": {MODULE: {"bits": 16}}}
    both = {f"{MODULE}.{name}": torch.zeros(16, 64) for name in ("weight", "qweight")}
    layer = ModuleTensors(TensorDict(both), MODULE, set(both), torch.device("cpu"))
    assert not parse(config, "config.json").is_quantized(layer)


def test_unfilled_group_indices_say_nothing():
    values, scales, zeros = random_layer(16, 64, 4, 32)
    tensors = gptq(values, scales, zeros, 4, [0] * 64, v1=True)
    assert torch.equal(
        read(GPTQ, tensors, 16, 64).dequantize(), dequantize(values, scales, zeros, groups_in_order(64, 32))
    )


def packed_config(**weights):
    group = {"targets": ["Linear"], "weights": {"type": "int", "strategy": "group", "symmetric": True} | weights}
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize(("num_outputs", "num_inputs", "group"), [(33, 100, 20), (40, 64, 64), (7, 31, None)])
@pytest.mark.parametrize("bits", [4, 8])
def test_compressed_tensors(bits, num_outputs, num_inputs, group, symmetric):
    size = group or num_inputs
    values, scales, zeros = random_layer(num_outputs, num_inputs, bits, size)
    scales = scales.bfloat16()
    if symmetric:
        zeros = torch.full_like(zeros, 2 ** (bits - 1))
    tensors = compressed_tensors(values, scales, None if symmetric else zeros, bits)
    strategy = {"strategy": "channel"} if group is None else {"group_size": group}
    weight = read(packed_config(num_bits=bits, symmetric=symmetric, **strategy), tensors, num_outputs, num_inputs)
    assert torch.equal(weight.dequantize(), dequantize(values, scales, zeros, groups_in_order(num_inputs, size)))


def test_compressed_tensors_in_the_order_of_activations():
    values, scales, zeros = random_layer(8, 64, 4, 16)
    order = [groups_in_order(64, 16)[k] for k in torch.randperm(64, generator=torch.Generator().manual_seed(5))]
    tensors = compressed_tensors(values, scales, zeros, 4)
    config = packed_config(num_bits=4, symmetric=False, group_size=16, actorder="group")
    tensors["weight_g_idx"] = torch.tensor(order, dtype=torch.int32)
    assert torch.equal(read(config, tensors, 8, 64).dequantize(), dequantize(values, scales, zeros, order))
    tensors["weight_g_idx"] = torch.full((64,), -1, dtype=torch.int32)
    expected = dequantize(values, scales, zeros, groups_in_order(64, 16))
    assert torch.equal(read(config, tensors, 8, 64).dequantize(), expected)


def test_nearest_target_of_compressed_tensors_wins():
    config = packed_config(num_bits=4, group_size=16)
    eight_bits = {"type": "int", "num_bits": 8, "strategy": "channel", "symmetric": True}
    config["config_groups"]["group_1"] = {"targets": ["re:.*down_proj$"], "weights": eight_bits}
    values, scales, _ = random_layer(8, 64, 8, 64)
    weight = read(config, compressed_tensors(values, scales, None, 8), 8, 64)
    expected = dequantize(values, scales, torch.full((8, 1), 128), [0] * 64)
    assert torch.equal(weight.dequantize(), expected)


FP8_CONFIGS = {
    "fp8": {"quant_method": "fp8", "activation_scheme": "static"},
    "modelopt": {"quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head"]}},
    "modelopt-config": {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head"]},
    "compressed-tensors": {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {
            "a": {"targets": ["Linear"], "weights": {"type": "float", "num_bits": 8, "strategy": "tensor"}}
        },
    },
}


@pytest.mark.parametrize("shape", [(), (1,), (13,), (13, 1)])
@pytest.mark.parametrize("config", FP8_CONFIGS)
def test_fp8_a_tensor_and_a_channel(config, shape):
    values, numbers = random_e4m3(13, 50)
    scales = torch.rand(shape) + 0.01
    tensors = {"weight": values, "weight_scale": scales, "input_scale": torch.ones(1)}
    weight = read(FP8_CONFIGS[config], tensors, 13, 50)
    assert torch.equal(weight.dequantize(), numbers * scales.view(-1, 1))


@pytest.mark.parametrize("config", ["fp8", "compressed-tensors"])
def test_fp8_blocks_multiply(config):
    values, numbers = random_e4m3(150, 300)
    scales = torch.rand(2, 3) + 0.01
    if config == "fp8":
        settings = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
        tensors = {"weight": values, "weight_scale_inv": scales}
    else:
        weights = {"type": "float", "num_bits": 8, "strategy": "block", "block_structure": [128, 128]}
        settings = FP8_CONFIGS[config] | {"config_groups": {"a": {"targets": ["Linear"], "weights": weights}}}
        tensors = {"weight": values, "weight_scale": scales}
    by_element = torch.stack([torch.stack([scales[n // 128, k // 128] for k in range(300)]) for n in range(150)])
    assert torch.equal(read(settings, tensors, 150, 300).dequantize(), numbers * by_element)


@pytest.mark.parametrize("algorithm", ["FP8_PB_WO", "fp8_pb_wo"])
def test_blocks_of_modelopt(algorithm):
    """Its grid has sides of 1 between and after those of the blocks."""
    values, numbers = random_e4m3(256, 384)
    scales = torch.rand(2, 3) + 0.01
    config = {"quantization": {"quant_algo": algorithm}}
    weight = read(config, {"weight": values, "weight_scale": scales.view(2, 1, 3, 1)}, 256, 384)
    expected = numbers.view(2, 128, 3, 128) * scales.view(2, 1, 3, 1)
    assert torch.equal(weight.dequantize(), expected.view(256, 384))


def test_powers_of_two_as_scales():
    values, numbers = random_e4m3(4, 8)
    scales = torch.tensor([[2.0**-5]]).to(torch.float8_e8m0fnu)
    settings = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    weight = read(settings, {"weight": values, "weight_scale_inv": scales}, 4, 8)
    assert torch.equal(weight.dequantize(), numbers * 2.0**-5)


@pytest.mark.parametrize("kind", BLOCK_TYPES)
def test_gguf_blocks(kind):
    block, number = BLOCK_TYPES[kind], gguf.GGMLQuantizationType[kind]
    assert gguf.GGML_QUANT_SIZES[number] == (block.num_weights, block.num_bytes)
    rows = np.random.default_rng(0).integers(0, 256, (9, 3 * block.num_bytes), dtype=np.uint8)
    halves = {"Q4_0": [0], "Q4_1": [0, 2], "Q8_0": [0], "Q4_K": [0, 2], "Q6_K": [208]}[kind]
    blocks = rows.reshape(9, 3, block.num_bytes)
    for start in halves:  # any fp16, but no NaN and no infinity
        blocks[..., start + 1] &= 0b10111011
    expected = torch.from_numpy(np.array(gguf_dequantize(rows, number)))
    weight = decode_blocks(torch.from_numpy(rows), block)
    assert torch.equal(weight.dequantize(), expected)
    assert weight.bits == (8 if kind in ("Q8_0", "Q6_K") else 4)


def test_file_decides_what_is_quantised_and_the_list_where_it_has_both():
    values, scales, zeros = random_layer(16, 64, 4, 32)
    packed = {f"{MODULE}.{name}": tensor for name, tensor in awq_gemm(values, scales, zeros).items()}
    floats = {f"{MODULE}.weight": torch.zeros(16, 64)}
    listed, unlisted = (
        parse(AWQ | {"modules_to_not_convert": names}, "config.json") for names in (["down_proj"], None)
    )

    def is_quantized(scheme, tensors):
        return scheme.is_quantized(ModuleTensors(TensorDict(tensors), MODULE, set(tensors), torch.device("cpu")))

    assert [is_quantized(scheme, packed) for scheme in (listed, unlisted)] == [True, True]
    assert [is_quantized(scheme, floats) for scheme in (listed, unlisted)] == [False, False]
    assert [is_quantized(scheme, packed | floats) for scheme in (listed, unlisted)] == [False, True]


def test_a_config_may_be_about_the_kv_cache_alone():
    config = {
        "quant_method": "compressed-tensors",
        "format": "dense",
        "quantization_status": "frozen",
        "config_groups": {},
        "kv_cache_scheme": {"num_bits": 8, "type": "float"},
    }
    tensors = {f"{MODULE}.weight": torch.zeros(16, 64).bfloat16()}
    layer = ModuleTensors(TensorDict(tensors), MODULE, set(tensors), torch.device("cpu"))
    assert not parse(config, "config.json").is_quantized(layer)


def awq_without(name):
    def change(tensors):
        del tensors[name]

    return change


def awq_with(name, tensor):
    def change(tensors):
        tensors[name] = tensor

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (awq_without("qzeros"), r"there is no tensor .*down_proj\.qzeros"),
        (awq_without("qweight"), r"there is no tensor .*down_proj\.qweight"),
        (awq_without("scales"), r"there is no tensor .*down_proj\.scales"),
        (awq_with("qweight", torch.zeros(64, 3).int()), r"qweight is int32 \[64, 3\], not int32 \[64, 2\]"),
        (awq_with("qzeros", torch.zeros(2, 2)), r"qzeros is float32 \[2, 2\], not int32 \[2, 2\]"),
        (awq_with("scales", torch.zeros(2, 16, 1)), r"scales is float32 \[2, 16, 1\]"),
        (awq_with("scales", torch.zeros(2, 16).int()), r"scales is int32"),
        (awq_with("qweight", torch.zeros(64, 4).to(torch.int16)), r"qweight is int16 \[64, 4\], not int16 \[4, 64\]"),
    ],
)
def test_hostile_tensors_are_named(change, message):
    tensors = awq_gemm(*random_layer(16, 64, 4, 32))
    change(tensors)
    with pytest.raises(BatchInferError, match=message) as caught:
        read(AWQ, tensors, 16, 64)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("g_idx", [[0] * 63 + [1], [0, 1] * 31 + [2, 2], [-1] * 64])
def test_group_indices_that_make_no_groups_are_named(g_idx):
    tensors = gptq(*random_layer(32, 64, 4, 32), 4, g_idx)
    with pytest.raises(BatchInferError, match=r"down_proj\.g_idx does not put 32 inputs into each group"):
        read(GPTQ | {"desc_act": True}, tensors, 32, 64)


@pytest.mark.parametrize(
    ("scale", "message"),
    [
        (torch.ones(2, 1), r"weight_scale is \[2, 1\], neither one scale nor one for each of 13 channels"),
        (torch.ones(13).int(), "weight_scale is int32"),
    ],
)
def test_scales_that_do_not_fit_are_named(scale, message):
    tensors = {"weight": random_e4m3(13, 50)[0], "weight_scale": scale}
    with pytest.raises(BatchInferError, match=message):
        read(FP8_CONFIGS["fp8"], tensors, 13, 50)


def test_nan_among_the_weights_is_named():
    values = torch.full((13, 50), 127, dtype=torch.uint8).view(torch.float8_e4m3fn)
    with pytest.raises(BatchInferError, match=r"down_proj: .*NaN"):
        read(FP8_CONFIGS["fp8"], {"weight": values, "weight_scale": torch.ones(1)}, 13, 50)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"quant_method": "bitsandbytes"}, "quant_method = 'bitsandbytes' is not read; must be one of awq, gptq"),
        ({"bits": 4}, "quant_method = '' is not read"),
        ({"quant_method": 4}, "quant_method = 4 must be text"),
        (AWQ | {"bits": 3}, "bits = 3 is not read; must be one of 4"),
        (AWQ | {"bits": "4"}, "bits = '4' must be an integer"),
        (AWQ | {"group_size": 0}, "group_size = 0 must be -1 or 1 or more"),
        (AWQ | {"version": "marlin"}, "version = 'marlin' is not read"),
        (AWQ | {"modules_to_not_convert": "lm_head"}, "modules_to_not_convert = 'lm_head' must be a list"),
        (GPTQ | {"bits": 5}, "bits = 5 is not read; must be one of 2, 3, 4, 8"),
        (GPTQ | {"checkpoint_format": "gptq_p"}, "format = 'gptq_p' is not read"),
        (GPTQ | {"pack_dtype": "int64"}, "pack_dtype = 'int64' is not read"),
        (GPTQ | {"rotation": "hadamard"}, "rotation = 'hadamard' changes what the weights mean"),
        (GPTQ | {"dynamic": {"+:(": {}}}, "is not a regular expression"),
        (GPTQ | {"dynamic": {"+:a": 3}}, "must be an object"),
        (packed_config(num_bits=5, group_size=32), "num_bits = 5 is not read"),
        (packed_config(num_bits=4, strategy="tensor_group"), "strategy = 'tensor_group' is not read"),
        (packed_config(num_bits=4, group_size=32) | {"format": "nvfp4-pack-quantized"}, "is not read"),
        (packed_config(num_bits=4, group_size=32) | {"transform_config": {"a": 1}}, "transform_config"),
        (
            packed_config(num_bits=4, group_size=32) | {"quantization_status": "frozen"},
            "quantization_status = 'frozen'",
        ),
        (packed_config(num_bits=8, type="float"), "does not hold weights of type float"),
        (packed_config(num_bits=4, group_size=32) | {"config_groups": {}}, "names no quantised layers"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, "must be two sizes, rows and columns"),
        (AUTO_ROUND | {"packing_format": "auto_round:llm_compressor"}, "packing_format = .* is not read"),
        (AUTO_ROUND | {"data_type": "mx_fp"}, "data_type = 'mx_fp' is not read"),
        (AUTO_ROUND | {"extra_config": {"a": 3}}, r"extra_config\.a = 3 must be an object"),
        (
            AUTO_ROUND | {"packing_format": "auto_round:auto_awq", "extra_config": {"a": {"bits": 8}}},
            "layers of AWQ are all alike",
        ),
        (AUTO_ROUND | {"act_bits": 8}, "act_bits = 8 changes what the weights mean"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "quant_algo = 'NVFP4' is not read"),
        ({"quant_method": "gguf", "types": {"a": "Q2_K"}}, "types.a = 'Q2_K' is not read"),
    ],
)
def test_settings_that_are_not_read_are_named(config, message):
    with pytest.raises(BatchInferError, match=message) as caught:
        parse(config, "config.json: quantization_config")
    assert str(caught.value).startswith("config.json: quantization_config")
    assert "\n" not in str(caught.value)
