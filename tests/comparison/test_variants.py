"""What --vary means: values by their option's type, the cross product's order, the plan of runs, the error lines."""

import pytest

from batchinfer.comparison.child import flags
from batchinfer.comparison.variants import cross_product, parse_variations, plan_runs, with_variant
from batchinfer.errors import UsageError
from batchinfer.options import EffectiveOptions, OptionValue

BASE = EffectiveOptions.resolve({"input": ("a.jsonl",)})


def values(*texts: str) -> list[dict[str, object]]:
    return [dict(variant.values) for variant in cross_product(parse_variations(texts))]


def test_values_have_the_type_of_their_option():
    assert values("kv-cache-memory=24MiB,1GB") == [{"kv_cache_memory": 24 * 2**20}, {"kv_cache_memory": 10**9}]
    assert values("--enable_prefix_caching=on,off") == [
        {"enable_prefix_caching": True},
        {"enable_prefix_caching": False},
    ]
    assert values("temperature=0,0.5") == [{"temperature": 0.0}, {"temperature": 0.5}]
    assert values("max_num_seqs= 8 , 16") == [{"max_num_seqs": 8}, {"max_num_seqs": 16}]
    assert values("model=a/b=c,d") == [{"model": "a/b=c"}, {"model": "d"}]
    assert values("input=a.jsonl,b.jsonl") == [{"input": ("a.jsonl",)}, {"input": ("b.jsonl",)}]
    assert values("deadline=90m,2h") == [{"deadline": 5400.0}, {"deadline": 7200.0}]


def test_the_guard_of_the_cache_varies_though_benches_leave_it_out():
    """A bench replaces what nobody said; what varies is said to each run as a flag."""
    first, second = cross_product(parse_variations(["kv-guard=0,strict:2"]))
    assert "--kv-guard=0" in flags(with_variant(BASE, first))
    varied = with_variant(BASE, second)
    assert "--kv-guard=strict:2" in flags(varied)
    assert varied.refined({"kv_guard": OptionValue("0", "bench")})["kv_guard"].value == "strict:2"
    assert BASE.refined({"kv_guard": OptionValue("0", "bench")})["kv_guard"].value == "0"


def test_the_last_option_varies_fastest():
    variants = cross_product(parse_variations(["kv_cache_dtype=bf16,fp8", "block_size=8,16,32"]))
    assert [variant.name for variant in variants] == [
        f"kv_cache_dtype={dtype}, block_size={size}" for dtype in ("bf16", "fp8") for size in (8, 16, 32)
    ]
    assert [variant.values["block_size"] for variant in variants] == [8, 16, 32, 8, 16, 32]


def test_an_option_that_comes_again_gives_one_value_each_time_commas_included():
    texts = ["kv_cache_dtype_skip_layers=0,5-9", "max_num_seqs=4,8", "kv-cache-dtype-skip-layers=3"]
    assert values(*texts) == [
        {"kv_cache_dtype_skip_layers": layers, "max_num_seqs": number} for layers in ("0,5-9", "3") for number in (4, 8)
    ]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("max_num_seqs", ["'max_num_seqs'", "OPTION=VALUE,VALUE"]),
        ("kv_cache_dtyp=fp8,int8", ["kv_cache_dtyp", "'kv_cache_dtype'"]),
        ("zzzzzz=1,2", ["zzzzzz", "kv_cache_dtype", "max_num_seqs", "model"]),
        ("output=a,b", ["output", "not written"]),
        ("kv_cache_dtype=fp8,fp9", ["kv_cache_dtype", "'fp9'", "fp8_e5m2", "int8"]),
        ("enable_prefix_caching=on,maybe", ["'maybe'", "on, off"]),
        ("max_num_seqs=1,x", ["max_num_seqs", "'x'", "whole number"]),
        ("kv_cache_memory=1MiB,big", ["'big'", "size", "MiB"]),
        ("max_num_seqs=8", ["two values or more"]),
        ("max_num_seqs=8,16,08", ["08 comes twice"]),
    ],
)
def test_what_cannot_vary_is_one_line_that_says_what_is_allowed(text, words):
    with pytest.raises(UsageError) as caught:
        parse_variations([text])
    message = str(caught.value)
    assert "\n" not in message
    assert [word for word in words if word not in message] == []


def test_a_rule_of_the_configuration_is_named_with_the_variant():
    variants = cross_product(parse_variations(["max_num_seqs=4,0"]))
    assert with_variant(BASE, variants[0]).config.scheduler.max_num_seqs == 4
    with pytest.raises(UsageError, match=r"variant max_num_seqs=0: max_num_seqs = 0: must be 1 or more"):
        with_variant(BASE, variants[1])


def test_every_other_round_runs_backwards():
    assert plan_runs(2, 2) == [(0, 0), (0, 1), (1, 1), (1, 0)]
    assert plan_runs(3, 3) == [(0, 0), (0, 1), (0, 2), (1, 2), (1, 1), (1, 0), (2, 0), (2, 1), (2, 2)]
    assert plan_runs(2, 1) == [(0, 0), (0, 1)]
