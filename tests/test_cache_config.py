"""The options of the KV cache that are written in parts: layers and the guard."""

import pytest

from batchinfer.config import CacheConfig, JobConfig


@pytest.mark.parametrize(
    ("text", "layers"),
    [("", ()), ("3", (3,)), ("0,2", (0, 2)), ("7,1-3,2", (1, 2, 3, 7)), ("5-5, 4", (4, 5))],
)
def test_layers(text, layers):
    dtype = "fp8" if text else "auto"
    assert CacheConfig(kv_cache_dtype=dtype, kv_cache_dtype_skip_layers=text).skip_layers == layers


@pytest.mark.parametrize("text", ["x", "1,", "3-1", "-1", "1--2", "1.5", "99999"])
def test_broken_layers_are_refused(text):
    with pytest.raises(ValueError, match=r"^kv_cache_dtype_skip_layers = .*: must be layer numbers as in 0,5-9$"):
        CacheConfig(kv_cache_dtype="int8", kv_cache_dtype_skip_layers=text)


def test_layers_are_skipped_under_8_bits_only():
    with pytest.raises(ValueError, match="absent where kv_cache_dtype is none of fp8, fp8_e5m2, int8"):
        CacheConfig(kv_cache_dtype="bf16", kv_cache_dtype_skip_layers="1")


@pytest.mark.parametrize(
    ("text", "dtype", "rules"),
    [
        ("4", "fp8", (4, False)),
        ("0", "int8", (0, False)),
        ("strict", "fp8", (4, True)),
        ("strict:9", "fp8_e5m2", (9, True)),
        ("9", "auto", (0, False)),
        ("strict", "fp16", (0, True)),
    ],
)
def test_guard(text, dtype, rules):
    assert CacheConfig(kv_cache_dtype=dtype, kv_guard=text).guard == rules


@pytest.mark.parametrize("text", ["", "soft", "strict:", "strict:x", "-1", "4:strict"])
def test_broken_guards_are_refused(text):
    with pytest.raises(ValueError, match=r"^kv_guard = .*: must be N, strict or strict:N$"):
        CacheConfig(kv_guard=text)


def test_a_resumed_job_keeps_strictness_and_layers_but_not_the_number_of_rows():
    def fingerprint(**options):
        return JobConfig.from_options({"kv_cache_dtype": "fp8", **options}).fingerprint_options()

    assert fingerprint(kv_guard="2") == fingerprint(kv_guard="0") == fingerprint()
    assert fingerprint(kv_guard="strict") == fingerprint(kv_guard="strict:2") != fingerprint()
    assert fingerprint(kv_cache_dtype_skip_layers="1") != fingerprint()
