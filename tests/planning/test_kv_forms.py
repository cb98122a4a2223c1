"""Closed forms of KV bytes against numbers worked out by hand from published shapes."""

import pytest

from batchinfer.cache.spec import KVCacheSpec
from batchinfer.planning.kv_forms import KV_DTYPES, AttentionShape

LLAMA_8B = AttentionShape(num_layers=32, num_q_heads=32, num_kv_heads=8, head_dim=128)
DEEPSEEK_V3 = AttentionShape(61, 128, 128, 128, latent_width=512 + 64)


@pytest.mark.parametrize(
    ("kind", "dtype", "expected"),
    [
        ("GQA", "bf16", 128 * 1024),  # 2 * 32 layers * 8 heads * 128 * 2 bytes
        ("GQA", "fp32", 256 * 1024),
        ("GQA", "fp8", 64 * 1024 + 2 * 32 * 8 * 4),  # and a float32 scale a head, for keys and for values
        ("GQA", "int8", 67_584),
        ("MHA", "bf16", 512 * 1024),  # 32 heads in place of 8
        ("MQA", "bf16", 16 * 1024),
        ("MLA", "bf16", 32 * 576 * 2),  # 4.5 heads of 128
        ("MLA", "fp8", 32 * (576 + 4)),
    ],
)
def test_llama_3_1_8b(kind: str, dtype: str, expected: int) -> None:
    assert LLAMA_8B.kind == "GQA"
    assert LLAMA_8B.kv_bytes_per_token(kind, dtype) == expected


def test_static_scales_take_no_room() -> None:
    assert LLAMA_8B.kv_bytes_per_token("GQA", "fp8", has_scales=False) == 64 * 1024


def test_deepseek_v3() -> None:
    """576 values in each of 61 layers, where full keys and values would be 128 heads of 128 each."""
    assert DEEPSEEK_V3.kind == "MLA"
    assert DEEPSEEK_V3.kv_bytes_per_token("MLA", "bf16") == 576 * 61 * 2 == 70_272
    assert DEEPSEEK_V3.kv_bytes_per_token("MHA", "bf16") == 2 * 61 * 128 * 128 * 2


@pytest.mark.parametrize(("kv_heads", "kind"), [(9, "MHA"), (3, "GQA"), (1, "MQA")])
def test_the_kind_follows_from_the_heads(kv_heads: int, kind: str) -> None:
    assert AttentionShape(30, 9, kv_heads, 64).kind == kind


@pytest.mark.parametrize("dtype", KV_DTYPES)
def test_agrees_with_what_the_cache_allocates(dtype: str) -> None:
    narrow = dtype in ("fp8", "fp8_e5m2", "int8")
    cache = KVCacheSpec(32, 8, 128, 16, dtype, per_token_scales=narrow)
    assert LLAMA_8B.kv_bytes_per_token("GQA", dtype) == cache.bytes_per_token()
