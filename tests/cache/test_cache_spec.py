from dataclasses import replace

import pytest

from batchinfer.cache.spec import KVCacheSpec

SMOLLM2 = KVCacheSpec(num_layers=30, num_kv_heads=3, head_dim=64, block_size=16, dtype="bf16", per_token_scales=False)


@pytest.mark.parametrize(
    ("dtype", "scales", "bytes_per_token"),
    [
        ("fp32", False, 46_080),
        ("bf16", False, 23_040),
        ("fp16", False, 23_040),
        ("fp8", True, 12_240),  # 2 x 30 x 3 x (64 + 4)
        ("fp8_e5m2", True, 12_240),
        ("int8", True, 12_240),
        ("fp8", False, 11_520),
    ],
)
def test_bytes_of_a_token_and_a_block(dtype: str, scales: bool, bytes_per_token: int) -> None:
    spec = replace(SMOLLM2, dtype=dtype, per_token_scales=scales)
    assert spec.bytes_per_token() == bytes_per_token
    assert spec.bytes_per_block() == 16 * bytes_per_token


def test_gain_over_16_bits_counts_the_scales() -> None:
    assert SMOLLM2.gain_over_16_bits() == 1
    assert replace(SMOLLM2, dtype="fp32").gain_over_16_bits() == 0.5
    assert replace(SMOLLM2, dtype="fp8").gain_over_16_bits() == 2
    with_scales = replace(SMOLLM2, dtype="fp8", per_token_scales=True)
    assert with_scales.gain_over_16_bits() == pytest.approx(128 / 68)


def test_whole_blocks_only() -> None:
    block = 16 * 23_040
    assert [SMOLLM2.num_blocks(memory) for memory in (0, block - 1, block, 3 * block - 1)] == [0, 0, 1, 2]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_layers": 0}, "num_layers = 0"),
        ({"num_kv_heads": 0}, "num_kv_heads = 0"),
        ({"head_dim": -1}, "head_dim = -1"),
        ({"block_size": 0}, "block_size = 0"),
        ({"dtype": "auto"}, "dtype = 'auto': must be one of fp32, bf16"),
        ({"per_token_scales": True}, "must be False for dtype bf16"),
        ({"dtype": "int8"}, "must be True for dtype int8"),
        ({"wide_layers": (30,)}, r"wide_layers = \(30,\): must be rising, from 0 to 29"),
        ({"wide_layers": (-1,)}, "wide_layers"),
        ({"wide_layers": (2, 1)}, "wide_layers"),
        ({"wide_layers": (1, 1)}, "wide_layers"),
        ({"wide_dtype": "fp8"}, "wide_dtype = 'fp8': must be one of fp32, bf16, fp16"),
    ],
)
def test_broken_rules_are_named(change: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(SMOLLM2, **change)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("wide_layers", "wide_dtype", "bytes_per_token"),
    [
        ((0,), "bf16", 12_240 - 408 + 768),  # a layer: 2 x 3 x (64 + 4) with 8 bits, 2 x 3 x 64 x 2 with 16
        ((0, 7, 29), "fp16", 12_240 + 3 * 360),
        ((29,), "fp32", 12_240 - 408 + 1_536),
        (tuple(range(30)), "bf16", 23_040),
    ],
)
def test_wide_layers_cost_their_own_bytes(wide_layers: tuple[int, ...], wide_dtype: str, bytes_per_token: int) -> None:
    spec = replace(SMOLLM2, dtype="fp8", per_token_scales=True, wide_layers=wide_layers, wide_dtype=wide_dtype)
    assert spec.bytes_per_token() == bytes_per_token
    assert spec.bytes_per_block() == 16 * bytes_per_token
    assert spec.gain_over_16_bits() == pytest.approx(23_040 / bytes_per_token)
    assert [spec.layer_dtype(layer) == wide_dtype for layer in range(30)] == [n in wide_layers for n in range(30)]
    assert [spec.has_scales(layer) for layer in range(30)] == [n not in wide_layers for n in range(30)]
