"""The LLM class over the tiny model: results in order, options by run's names, and what survives an interruption."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small_tokenizers import BOS, EOS, ids_of
from tiny_jobs import CONTEXT, call, read_rows, write_jsonl

from batchinfer import LLM, SamplingParams
from batchinfer.engine.engine import Engine
from batchinfer.errors import BatchInferError, UsageError

GREEDY = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)


@pytest.fixture(scope="module")
def llm(tiny_model: Path) -> LLM:
    return LLM(model=str(tiny_model), threads=1, kv_cache_memory="256KiB", max_num_seqs=4)


def texts(results: list[Any]) -> list[str]:
    return [result.text for result in results]


def test_results_come_in_the_order_of_the_prompts(llm: LLM) -> None:
    lengths = [40, 1, 20, 3, 30, 2]
    params = [SamplingParams(max_tokens=n, ignore_eos=True, seed=n) for n in lengths]
    results = llm.generate([f"prompt {n}" for n in lengths], params)
    assert [len(result.token_ids) for result in results] == lengths
    assert [result.finish_reason for result in results] == ["length"] * 6
    for result in results:
        assert result.num_preemptions == 0
        assert 0 <= result.queue_ms <= result.ttft_ms <= result.latency_ms
        assert result.ttft_ms == pytest.approx(result.queue_ms + result.prefill_ms)


def test_calls_in_one_process_neither_lose_nor_mix_results(llm: LLM) -> None:
    first, second = llm.generate(["a", "b"], GREEDY), llm.generate(["b", "a", "c"], GREEDY)
    assert texts(second)[:2] == texts(first)[::-1]
    assert len(second) == 3


def test_a_prompt_is_text_or_token_ids_alone_or_in_a_list(llm: LLM) -> None:
    (from_text,) = llm.generate("hello", GREEDY)
    ids = [BOS, *ids_of("hello")]
    forms: list[Any] = [["hello"], ids, [ids], np.array(ids), [np.array(ids, np.int64)], tuple(ids)]
    for prompts in forms:
        (result,) = llm.generate(prompts, GREEDY)
        assert result.token_ids == from_text.token_ids
    assert llm.generate([], GREEDY) == []
    with pytest.raises(UsageError, match="all text or all token ids"):
        llm.generate(["hello", ids], GREEDY)
    with pytest.raises(UsageError, match="prompts: int is neither text"):
        llm.generate(5, GREEDY)


def test_bad_prompts_are_results_and_the_others_are_answered(llm: LLM) -> None:
    good, long, lone = llm.generate(["hello", "x" * 1000, "\ud800"], GREEDY)
    assert [r.finish_reason for r in (good, long, lone)] == ["length", "error", "error"]
    assert (long.error_code, lone.error_code) == ("prompt_too_long", "bad_prompt")
    outside, empty = llm.generate([[BOS, 999_999], []], GREEDY)
    assert (outside.error_code, empty.error_code) == ("bad_prompt", "empty_prompt")
    answered, missing = llm.generate(["hello", None], GREEDY)
    assert (answered.text, missing.error_code) == (good.text, "null_prompt")
    assert texts(llm.generate("hello", GREEDY)) == [good.text]


def test_samples_follow_each_other_and_differ(llm: LLM) -> None:
    params = [SamplingParams(max_tokens=12, n=3, ignore_eos=True), SamplingParams(max_tokens=12, n=2, ignore_eos=True)]
    results = llm.generate(["one", "two"], params)
    assert [(r.id.row, r.id.sample) for r in results] == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1)]
    assert len(set(texts(results))) == 5


def test_chat_applies_the_template_with_one_bos(llm: LLM) -> None:
    conversation = [{"role": "user", "content": "hi"}]
    ids = [BOS, 2, *ids_of("user\nhi"), EOS, 2, *ids_of("assistant\n")]
    (expected,) = llm.generate(ids, GREEDY)
    for conversations in (conversation, [conversation]):
        (result,) = llm.chat(conversations, GREEDY)
        assert (result.text, result.prompt_tokens) == (expected.text, len(ids))
    bad, good = llm.chat([[{"role": "user"}], conversation], GREEDY)
    assert bad.error_code == "bad_prompt"
    assert good.text == expected.text


def test_params_are_one_for_all_or_one_each(llm: LLM) -> None:
    with pytest.raises(UsageError, match="2 for 3 prompts"):
        llm.generate(["a", "b", "c"], [GREEDY, GREEDY])
    with pytest.raises(UsageError, match="params: must be SamplingParams"):
        llm.generate(["a"], {"max_tokens": 2})


def test_an_interrupted_call_leaves_a_usable_llm(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = [f"prompt {i}" for i in range(9)]
    before = texts(llm.generate(prompts, GREEDY))
    step = Engine.step

    def interrupted_step(self: Engine) -> list[Any]:
        results = step(self)
        if self.num_waiting:
            raise KeyboardInterrupt
        return results

    with monkeypatch.context() as patch:
        patch.setattr(Engine, "step", interrupted_step)
        with pytest.raises(KeyboardInterrupt):
            llm.generate(prompts, GREEDY)
    engine = llm._local.engine
    assert not engine.has_unfinished
    engine._block_pool.check_integrity()
    assert engine._block_pool.num_used_blocks == 0
    assert texts(llm.generate(prompts, GREEDY)) == before


def test_options_bear_the_names_of_run(llm: LLM, tiny_model: Path) -> None:
    bytes_per_token = 2 * 4 * 2 * 2 * 16  # keys and values in float32, 2 layers, 2 heads of 16
    assert llm._local.kv_cache_bytes == 2**18 == 2 * CONTEXT * bytes_per_token
    assert llm.model_path == tiny_model
    options = {"dtype": "fp32", "kv_cache_dtype": "fp8", "max_model_len": 40, "max_num_batched_tokens": 16}
    other = LLM(model=str(tiny_model), threads=1, temperature=0, max_tokens=6, ignore_eos=True, **options)
    (result,) = other.generate("hello")
    assert len(result.token_ids) == 6
    (long,) = other.generate("x" * 50)
    assert "max_model_len = 40" in long.error_message


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"kv_cache_dtyp": "fp8"}, "no option 'kv_cache_dtyp'; did you mean 'kv_cache_dtype'"),
        ({"zzz": 1}, "no option 'zzz'; those of `batchinfer run`"),
        ({"output": "x"}, "no option 'output'"),
        ({"lengths_from": "x"}, "no option 'lengths_from'"),
        ({"kv_cache_memory": "many"}, "kv_cache_memory: 'many' is not a size"),
        ({"dtype": "fp7"}, "dtype = 'fp7': must be"),
        ({"max_num_seqs": 0}, "max_num_seqs = 0: must be 1 or more"),
        ({"max_model_len": 100_000}, "the model has positions for 256 tokens"),
    ],
)
def test_unfit_options_are_refused_by_name(tiny_model: Path, options: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        LLM(model=str(tiny_model), **options)


def test_a_missing_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(BatchInferError, match="no such file or directory"):
        LLM(model=str(tmp_path / "absent"))


def test_llm_and_run_give_the_same_answers(llm: LLM, tiny_model: Path, tmp_path: Path) -> None:
    prompts = [f"prompt {i}" for i in range(5)]
    path = write_jsonl(tmp_path / "in.jsonl", [{"prompt": prompt} for prompt in prompts])
    options = ["--max-tokens", 16, "--n", 2, "--ignore-eos"]
    assert call(tiny_model, "--input", path, "--output", tmp_path / "out", *options) == 0
    results = llm.generate(prompts, SamplingParams(max_tokens=16, n=2, ignore_eos=True))
    assert [row["completion"] for row in read_rows(tmp_path / "out")] == texts(results)
