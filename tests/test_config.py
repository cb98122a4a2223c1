"""Each rule of the configuration, and the way from flat options to groups and back."""

import dataclasses

import pytest

from batchinfer.config import (
    CacheConfig,
    InputConfig,
    JobConfig,
    LimitsConfig,
    ModelConfig,
    OutputConfig,
    SamplingConfig,
    SchedulerConfig,
    iter_options,
)
from batchinfer.sampling_config import parse_logit_bias

BROKEN_RULES = [
    (InputConfig, {"on_too_long": "drop"}, "on_too_long", "truncate-left"),
    (InputConfig, {"limit": 0}, "limit", "1 or more"),
    (InputConfig, {"sample": -1}, "sample", "1 or more"),
    (InputConfig, {"limit": 2, "sample": 2}, "sample", "absent where limit"),
    (InputConfig, {"prompt_column": "a", "template": "b"}, "prompt source", "one of"),
    (InputConfig, {"messages_column": "a", "prompt_token_ids_column": "b"}, "prompt source", "one of"),
    (SamplingConfig, {"max_tokens": -1}, "max_tokens", "0 or more"),
    (SamplingConfig, {"min_tokens": -1}, "min_tokens", "0 or more"),
    (SamplingConfig, {"min_tokens": 9, "max_tokens": 8}, "min_tokens", "at most max_tokens"),
    (SamplingConfig, {"temperature": -0.5}, "temperature", "0 or more"),
    (SamplingConfig, {"temperature": float("nan")}, "temperature", "finite"),
    (SamplingConfig, {"top_p": 0.0}, "top_p", "above 0"),
    (SamplingConfig, {"top_p": 1.5}, "top_p", "at most 1"),
    (SamplingConfig, {"top_k": -2}, "top_k", "1 or more"),
    (SamplingConfig, {"min_p": 1.01}, "min_p", "from 0 to 1"),
    (SamplingConfig, {"stop": ("",)}, "stop", "non-empty"),
    (SamplingConfig, {"repetition_penalty": 0.0}, "repetition_penalty", "above 0"),
    (SamplingConfig, {"presence_penalty": 2.5}, "presence_penalty", "from -2 to 2"),
    (SamplingConfig, {"frequency_penalty": -2.5}, "frequency_penalty", "from -2 to 2"),
    (SamplingConfig, {"logit_bias": "[1, 2]"}, "logit_bias", "JSON object"),
    (SamplingConfig, {"logit_bias": '{"a": 1}'}, "logit_bias", "JSON object"),
    (SamplingConfig, {"logit_bias": '{"1": null}'}, "logit_bias", "JSON object"),
    (SamplingConfig, {"logit_bias": '{"1": NaN}'}, "logit_bias", "finite"),
    (SamplingConfig, {"n": 0}, "n", "from 1 to"),
    (SamplingConfig, {"logprobs": 101}, "logprobs", "from 0 to 100"),
    (ModelConfig, {"dtype": "fp8"}, "dtype", "bf16"),
    (ModelConfig, {"activation_dtype": "fp4"}, "activation_dtype", "one of auto, int8, fp8"),
    (ModelConfig, {"device": "tpu"}, "device", "cuda"),
    (ModelConfig, {"max_model_len": 1}, "max_model_len", "2 or more"),
    (ModelConfig, {"threads": 0}, "threads", "from 1 to 1024"),
    (ModelConfig, {"threads": 100_000}, "threads", "from 1 to 1024"),
    (CacheConfig, {"kv_cache_dtype": "int4"}, "kv_cache_dtype", "fp8_e5m2"),
    (CacheConfig, {"gpu_memory_utilization": 0.0}, "gpu_memory_utilization", "above 0"),
    (CacheConfig, {"gpu_memory_utilization": 1.1}, "gpu_memory_utilization", "at most 1"),
    (CacheConfig, {"block_size": 0}, "block_size", "from 1 to 1024"),
    (CacheConfig, {"block_size": 1025}, "block_size", "from 1 to 1024"),
    (CacheConfig, {"kv_cache_memory": 0}, "kv_cache_memory", "above 0"),
    (SchedulerConfig, {"max_num_batched_tokens": 0}, "max_num_batched_tokens", "1 or more"),
    (SchedulerConfig, {"max_num_seqs": 0}, "max_num_seqs", "1 or more"),
    (SchedulerConfig, {"order": "random"}, "order", "one of packed, input"),
    (SchedulerConfig, {"admission": "lazy"}, "admission", "one of forecast, greedy"),
    (SchedulerConfig, {"batching": "dynamic"}, "batching", "one of continuous, static"),
    (SchedulerConfig, {"kv_allocation": "pooled"}, "kv_allocation", "one of paged, contiguous"),
    (OutputConfig, {"rows_per_part": 0}, "rows_per_part", "1 or more"),
    (LimitsConfig, {"deadline": 0.0}, "deadline", "above 0"),
    (LimitsConfig, {"max_errors": "many"}, "max_errors", "a count or N%"),
    (LimitsConfig, {"max_errors": "1.5"}, "max_errors", "a count or N%"),
    (LimitsConfig, {"max_errors": "-1"}, "max_errors", "a count or N%"),
]


@pytest.mark.parametrize(("group", "options", "name", "allowed"), BROKEN_RULES)
def test_broken_rule_names_field_and_what_is_allowed(group, options, name, allowed):
    with pytest.raises(ValueError, match=allowed) as caught:
        group(**options)
    assert str(caught.value).startswith(name)


def test_every_group_with_rules_accepts_its_edges():
    InputConfig(limit=1)
    SamplingConfig(max_tokens=0, temperature=0.0, top_p=1.0, top_k=-1, min_p=1.0, n=1, logprobs=0, seed=-5)
    ModelConfig(max_model_len=2, threads=1)
    CacheConfig(gpu_memory_utilization=1.0, block_size=1024, kv_cache_memory=1)
    LimitsConfig(deadline=0.1, max_errors="0")


def test_options_have_unique_names_and_a_help_text():
    members = [member for _, member in iter_options()]
    assert len({member.name for member in members}) == len(members)
    for member in members:
        assert len(member.metadata["help"]) > 15, member.name
        assert member.metadata["kind"] in {"value", "flag", "many", "size", "duration", "json"}


def test_flat_options_reach_their_group_and_come_back():
    config = JobConfig.from_options({"input": ("a.parquet",), "dtype": "fp32", "block_size": 32, "stop": ("x", "y")})
    assert config.input.input == ("a.parquet",)
    assert config.model.dtype == "fp32"
    assert config.cache.block_size == 32
    assert JobConfig.from_options(config.to_options()) == config


def test_unknown_flat_option_is_an_error():
    with pytest.raises(ValueError, match="unknown option 'max_token'"):
        JobConfig.from_options({"max_token": 3})


def test_configuration_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        JobConfig().model.dtype = "fp32"


def test_fingerprint_keeps_what_changes_answers_and_leaves_what_changes_speed():
    names = set(JobConfig().fingerprint_options())
    assert {"input", "temperature", "seed", "model", "dtype", "kv_cache_dtype", "rows_per_part", "max_tokens"} <= names
    speed = {"threads", "kv_cache_memory", "max_num_seqs", "max_num_batched_tokens", "block_size", "deadline"}
    assert not speed & names
    assert not {"order", "admission", "batching", "kv_allocation"} & names
    assert not {"output", "overwrite", "max_errors"} & names


@pytest.mark.parametrize(
    ("max_errors", "num_rows", "allowed"),
    [(None, 10, None), ("0", 10, 0), ("7", 3, 7), ("5%", 100, 5), ("5%", 99, 4), ("0.1%", 1000, 1), ("100%", 3, 3)],
)
def test_allowed_failures(max_errors, num_rows, allowed):
    assert LimitsConfig(max_errors=max_errors).max_failed_rows(num_rows) == allowed


def test_logit_bias_pairs():
    assert parse_logit_bias('{"42": -1.5, "7": 100}') == ((42, -1.5), (7, 100.0))
