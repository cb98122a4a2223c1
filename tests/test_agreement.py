"""Counting agreeing tokens, against a naive count, and the options of the run that answers are compared with."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchinfer.agreement import TokenKeeper, mean_agreement, reference_options
from batchinfer.errors import BatchInferError, ErrorCode
from batchinfer.options import EffectiveOptions
from batchinfer.request import RequestId, Result

TOKENS = st.lists(st.integers(0, 2), max_size=6)
ANSWERS = st.dictionaries(st.integers(0, 5), TOKENS, max_size=5)


def keyed(answers):
    return {RequestId(0, row, 0): tokens for row, tokens in answers.items()}


@given(ANSWERS, ANSWERS)
def test_mean_agreement_equals_a_naive_count(answers, reference):
    counts = []
    for row in range(6):
        if row in answers and row in reference:
            count = 0
            while answers[row][: count + 1] == reference[row][: count + 1] and count < len(answers[row]):
                count += 1
            counts.append(min(count, len(reference[row])))
    if counts:
        assert mean_agreement(keyed(answers), keyed(reference)) == sum(counts) / len(counts)
    else:
        with pytest.raises(BatchInferError, match="no row"):
            mean_agreement(keyed(answers), keyed(reference))


def test_tokens_are_kept_by_sample_and_errors_are_not():
    keeper = TokenKeeper()
    keeper.expect(0, 1, 2)
    good = [Result(RequestId(0, 1, sample), "length", text="x", token_ids=[5, sample]) for sample in (0, 1)]
    keeper.add([good[1], Result(RequestId(0, 2, 0), "error", error_code=ErrorCode.NULL_PROMPT)])
    keeper.add([good[0]])
    assert keeper.tokens == {RequestId(0, 1, 0): [5, 0], RequestId(0, 1, 1): [5, 1]}


def test_the_reference_runs_the_same_job_in_float32():
    flags = {
        **{"input": ("a",), "seed": 3, "limit": 7, "model": "m", "dtype": "bf16", "activation_dtype": "int8"},
        **{"kv_cache_dtype": "fp8", "kv_cache_memory": 2**20, "max_num_seqs": 5},
    }
    options = EffectiveOptions.resolve(flags)
    config = reference_options(options, "other", 300).config
    assert (config.model.model, config.model.dtype, config.model.activation_dtype) == ("other", "fp32", "auto")
    assert (config.model.max_model_len, config.cache.kv_cache_memory, config.cache.kv_cache_dtype) == (
        300,
        None,
        "fp32",
    )
    assert (config.input, config.sampling, config.scheduler) == (
        options.config.input,
        options.config.sampling,
        options.config.scheduler,
    )
    assert options.config.model.model == "m"
