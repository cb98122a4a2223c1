"""Values of options: their types, their precedence and their sources."""

import dataclasses

import pytest

from batchinfer.config import iter_options
from batchinfer.errors import UsageError
from batchinfer.options import EffectiveOptions, OptionValue, coerce, scalar_type

MEMBERS = {member.name: member for _, member in iter_options()}


def test_flag_beats_job_file_beats_default():
    options = EffectiveOptions.resolve(
        {"input": ("a",), "dtype": "fp32"}, {"dtype": "bf16", "max_num_seqs": 8, "input": ("b",)}
    )
    assert options["dtype"] == ("fp32", "flag")
    assert options["max_num_seqs"] == (8, "job file")
    assert options["block_size"] == (16, "default")
    assert options["input"].value == ("a",)
    assert options.config.scheduler.max_num_seqs == 8


def test_generation_config_replaces_defaults_only():
    options = EffectiveOptions.resolve({"input": ("a",), "temperature": 0.1}, {"top_k": 7})
    found = {"temperature": 0.6, "top_k": 50, "top_p": 0.9}
    refined = options.refined({name: OptionValue(value, "generation_config") for name, value in found.items()})
    assert refined["temperature"] == (0.1, "flag")
    assert refined["top_k"] == (7, "job file")
    assert refined["top_p"] == (0.9, "generation_config")
    assert refined.config.sampling.top_p == 0.9
    assert options["top_p"] == (None, "default")
    assert list(refined) == list(options)


def test_every_option_is_there_with_its_source():
    options = EffectiveOptions.resolve({"input": ("a",)})
    assert set(options) == set(MEMBERS)
    assert {option.source for name, option in options.items() if name != "input"} == {"default"}


def test_description_and_json():
    options = EffectiveOptions.resolve({"input": ("a", "b")}, {"dtype": "fp32"})
    assert options.describe() == "input=a b (flag); dtype=fp32 (job file)"
    assert options.to_json()["input"] == {"value": ["a", "b"], "source": "flag"}
    assert options.to_json()["seed"] == {"value": 0, "source": "default"}


def test_the_effective_sampling_with_its_sources():
    options = EffectiveOptions.resolve({"input": ("a",), "temperature": 0.0, "stop": ("end", "\n\n")}, {"n": 2})
    found = {"top_k": OptionValue(20, "generation_config"), "top_p": OptionValue(1.0, "default")}
    flags, job_file, generation_config, rest = options.refined(found).describe_sampling().split("; ")
    assert flags == 'temperature=0.0, stop=end "\\n\\n" (flag)'
    assert job_file == "n=2 (job file)"
    assert generation_config == "top_k=20 (generation_config)"
    assert rest.startswith("max_tokens=room left, ")
    assert "top_p=1.0" in rest
    assert rest.endswith("seed=0 (default)")


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("kv_cache_memory", 24 * 2**20, "24MiB"),
        ("kv_cache_memory", 1000, "1000"),
        ("deadline", 5400.0, "5400s"),
        ("enable_prefix_caching", False, "off"),
        ("template", "Hello {{ name }}", '"Hello {{ name }}"'),
        ("template", "x " * 500, '"' + "x " * 40 + '…"'),
    ],
)
def test_values_are_said_in_one_line_as_they_are_written(name, value, text):
    options = EffectiveOptions.resolve({"input": ("a.parquet",), name: value})
    assert f"{name}={text}" in options.describe()
    assert options.describe().count("\n") == 0


def test_no_input_is_a_usage_error():
    with pytest.raises(UsageError, match="--input"):
        EffectiveOptions.resolve({})


def test_broken_rule_is_a_usage_error():
    with pytest.raises(UsageError, match="block_size = 0"):
        EffectiveOptions.resolve({"input": ("a",), "block_size": 0})


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("input", "a.parquet", ("a.parquet",)),
        ("input", ["a", "b"], ("a", "b")),
        ("stop_token_ids", [1, "2"], (1, 2)),
        ("kv_cache_memory", "24MiB", 24 * 2**20),
        ("kv_cache_memory", 1000, 1000),
        ("deadline", "90m", 5400.0),
        ("deadline", 60, 60.0),
        ("temperature", 1, 1.0),
        ("temperature", "0.5", 0.5),
        ("max_tokens", "128", 128),
        ("max_errors", 5, "5"),
        ("ignore_eos", True, True),
        ("ignore_eos", "false", False),
        ("logit_bias", {"42": -1.5}, '{"42": -1.5}'),
        ("logit_bias", '{"42": 1}', '{"42": 1}'),
    ],
)
def test_coerced(name, value, expected):
    coerced = coerce(MEMBERS[name], value)
    assert coerced == expected
    assert type(coerced) is type(expected)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_tokens", 1.5),
        ("max_tokens", True),
        ("max_tokens", "many"),
        ("temperature", True),
        ("temperature", [1.0]),
        ("ignore_eos", 1),
        ("ignore_eos", "yes"),
        ("model", True),
        ("model", ["a"]),
        ("input", [["a"]]),
        ("stop_token_ids", ["x"]),
        ("kv_cache_memory", "24 apples"),
        ("kv_cache_memory", 1.5),
        ("deadline", "soon"),
    ],
)
def test_value_of_the_wrong_type(name, value):
    with pytest.raises(ValueError, match="is not "):
        coerce(MEMBERS[name], value)


def test_scalar_types_follow_the_annotations():
    for member in MEMBERS.values():
        assert scalar_type(member) in (str, int, float, bool)
    assert scalar_type(MEMBERS["stop_token_ids"]) is int
    assert scalar_type(MEMBERS["stop"]) is str
    assert scalar_type(MEMBERS["top_p"]) is float


def test_options_cannot_be_changed():
    options = EffectiveOptions.resolve({"input": ("a",)})
    with pytest.raises(TypeError):
        options["dtype"] = "fp32"
    with pytest.raises(dataclasses.FrozenInstanceError):
        options.config.model.dtype = "fp32"
