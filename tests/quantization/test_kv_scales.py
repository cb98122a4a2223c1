"""KV scales under each of their names, and what is refused of them."""

import pytest
import torch
from written_formats import TensorDict

from batchinfer.errors import BatchInferError
from batchinfer.quantization.kv_scales import KVScales, are_usable, cache_dtypes, has_kv_scales, take_kv_scales

PREFIX = "model.layers.2."


def take(num_kv_heads=4, **tensors):
    source = TensorDict({PREFIX + name.replace("__", "."): tensor for name, tensor in tensors.items()})
    unused = set(source)
    scales = take_kv_scales(source, PREFIX, unused, num_kv_heads, torch.device("cpu"))
    assert not unused
    return scales


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("self_attn__k_scale", "self_attn__v_scale"),
        ("self_attn__attn__k_scale", "self_attn__attn__v_scale"),
        ("self_attn__k_proj__k_scale", "self_attn__v_proj__v_scale"),
        ("self_attn__qkv_proj__k_scale", "self_attn__qkv_proj__v_scale"),
        ("self_attn__k_cache__scale", "self_attn__v_cache__scale"),
        ("self_attn__k_proj__output_scale", "self_attn__v_proj__output_scale"),
    ],
)
def test_each_pair_of_names(key, value):
    scales = take(**{key: torch.tensor(0.25), value: torch.tensor([0.5]).bfloat16()})
    assert (scales.key.tolist(), scales.value.tolist()) == ([0.25], [0.5])
    assert (scales.key.dtype, scales.value.dtype) == (torch.float32, torch.float32)
    assert has_kv_scales(["x.weight", PREFIX + key.replace("__", ".")])


def test_other_tensors_are_no_scales_of_keys():
    names = ("q_proj.q_scale", "k_proj.weight_scale", "k_proj.weight", "o_proj.input_scale", "v_scale")
    assert not has_kv_scales([f"{PREFIX}self_attn.{name}" for name in names])
    assert has_kv_scales([f"{PREFIX}self_attn.kv_scale"])


def test_one_scale_for_both():
    scales = take(self_attn__kv_scale=torch.tensor(0.125))
    assert (scales.key.tolist(), scales.value.tolist()) == ([0.125], [0.125])


def test_a_scale_for_each_head():
    heads = torch.tensor([0.1, 0.2, 0.3, 0.4])
    scales = take(self_attn__k_scale=heads.view(4, 1, 1), self_attn__v_scale=heads.flip(0))
    assert torch.equal(scales.key, heads)
    assert torch.equal(scales.value, heads.flip(0))


def test_scales_of_queries_and_zeros_as_zero_points_have_no_bearing():
    one = torch.ones(1)
    zero = torch.zeros(1, dtype=torch.int8)
    scales = {"self_attn__q_scale": one, "self_attn__prob_scale": one, "self_attn__q_zero_point": one}
    assert take(**scales, self_attn__k_zero_point=zero, self_attn__v_zero_point=zero.expand(4).contiguous()) is None


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"self_attn__k_scale": torch.ones(1)}, r"self_attn has a scale for keys or values only"),
        ({"self_attn__k_scale": torch.ones(3)}, r"self_attn\.k_scale is .*\[3\], not a float, nor one for each of 4"),
        ({"self_attn__k_scale": torch.ones(1).int()}, r"self_attn\.k_scale is torch\.int32"),
        ({"self_attn__v_scale": torch.tensor(0.0)}, r"self_attn\.v_scale is \[0\.0\], not above 0"),
        ({"self_attn__v_scale": torch.tensor(-1.0)}, r"self_attn\.v_scale is \[-1\.0\]"),
        ({"self_attn__v_scale": torch.tensor(float("nan"))}, r"self_attn\.v_scale is \[nan\]"),
        ({"self_attn__v_scale": torch.tensor(float("inf"))}, r"self_attn\.v_scale is \[inf\]"),
        (
            {"self_attn__v_zero_point": torch.tensor([3], dtype=torch.int8)},
            r"v_zero_point is \[3\.0\], not 0: .*symmet",
        ),
        ({"self_attn__k_zero_point": torch.tensor([0.0, 1.0, 0.0, 0.0])}, r"self_attn\.k_zero_point is \[0\.0, 1\.0"),
        (
            {"self_attn__k_scale": torch.ones(1), "self_attn__k_proj__k_scale": torch.ones(1)},
            r"self_attn\.k_scale and .*k_proj\.k_scale are both there",
        ),
    ],
)
def test_broken_scales_are_named(tensors, message):
    with pytest.raises(BatchInferError, match=message) as caught:
        take(**tensors)
    assert "\n" not in str(caught.value)


def layer(key, value):
    return KVScales(torch.tensor([key]), torch.tensor([value]))


def test_scales_of_one_mean_that_nothing_was_measured():
    assert not are_usable([None, None], "checkpoint")
    assert not are_usable([layer(1.0, 1.0), layer(1.0, 1.0)], "checkpoint")
    assert are_usable([layer(1.0, 1.0), layer(1.0, 0.5)], "checkpoint")
    with pytest.raises(BatchInferError, match="checkpoint: layer 1 has no KV scales, but others have"):
        are_usable([layer(0.5, 0.5), None], "checkpoint")


@pytest.mark.parametrize(
    ("scheme", "dtypes"),
    [
        (None, ("fp8", "fp8_e5m2")),
        ({"num_bits": 8, "type": "float", "strategy": "tensor"}, ("fp8", "fp8_e5m2")),
        ({"num_bits": 8, "type": "int"}, ("int8",)),
    ],
)
def test_which_caches_the_scales_fit(scheme, dtypes):
    assert cache_dtypes({"kv_cache_scheme": scheme}) == dtypes
