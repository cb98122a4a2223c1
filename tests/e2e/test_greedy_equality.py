"""Greedy tokens of the default model equal Hugging Face's in float32, however the engine batches and preempts."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hugging_face import HuggingFaceOracle

from batchinfer import LLM, SamplingParams

TIE = 1e-4  # logits closer than this may be ordered either way by rounding

QUESTIONS = [
    "What is the capital of France, and what is it known for?",
    "Write a Python function that reverses the words of a sentence.",
    "List three uses of vinegar.",
    "Why is the sky blue? Answer in two sentences.",
    "Translate 'good morning' into Spanish, German and Italian.",
    "Explain recursion to a child.",
]


@pytest.fixture(scope="module")
def oracle(smollm2: Path) -> HuggingFaceOracle:
    return HuggingFaceOracle(smollm2)


def chat(question: str) -> str:
    return f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"


def complete(smollm2: Path, prompts: list[str], max_tokens: int, **options: Any) -> list[Any]:
    llm = LLM(model=str(smollm2), dtype="fp32", **options)
    return llm.generate(prompts, SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True))


def assert_greedy(oracle: HuggingFaceOracle, prompts: list[str], results: list[Any]) -> None:
    ties = []
    for index, (prompt, result) in enumerate(zip(prompts, results, strict=True)):
        gaps = oracle.gaps(oracle.encode(prompt), result.token_ids)
        worst = float(gaps.max())
        assert worst < TIE, f"prompt {index}: token {int(gaps.argmax())} lies {worst} below the greedy choice"
        ties += [(index, position, float(gaps[position])) for position in torch.nonzero(gaps)[:, 0].tolist()]
    print("ties within 1e-4 (prompt, token, gap):", ties)


def test_generate_agrees_with_the_gap_form_of_the_oracle(oracle: HuggingFaceOracle) -> None:
    prompt = oracle.encode(chat(QUESTIONS[0]))
    completion = oracle.generate(prompt, 24)
    assert float(oracle.gaps(prompt, completion).max()) < TIE
    completion[5] = (completion[5] + 1) % 1000
    assert float(oracle.gaps(prompt, completion)[5]) > TIE


def test_sample_prompts_equal_hugging_face(oracle: HuggingFaceOracle, smollm2: Path) -> None:
    prompts = [chat(q) for q in QUESTIONS]
    results = complete(smollm2, prompts, 32)
    assert [len(r.token_ids) for r in results] == [32] * len(prompts)
    assert_greedy(oracle, prompts, results)
    assert results[0].token_ids == oracle.generate(oracle.encode(prompts[0]), 32)


@pytest.fixture(scope="module")
def bench_prompts(bench_rows: Callable[[str, int], Any]) -> list[str]:
    return [row["prompt"] for row in bench_rows("short.parquet", 64)]


@pytest.fixture(scope="module")
def bench_results(smollm2: Path, bench_prompts: list[str]) -> list[Any]:
    return complete(smollm2, bench_prompts, 128)


@pytest.mark.slow
def test_64_bench_prompts_equal_hugging_face(
    oracle: HuggingFaceOracle, bench_prompts: list[str], bench_results: list[Any]
) -> None:
    assert [len(r.token_ids) for r in bench_results] == [128] * 64
    assert_greedy(oracle, bench_prompts, bench_results)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"max_num_seqs": 5, "block_size": 8, "max_num_batched_tokens": 64},
        {"block_size": 32, "max_num_batched_tokens": 37, "enable_prefix_caching": False},
        {"kv_cache_memory": "40MiB", "max_model_len": 512, "admission": "greedy"},
    ],
    ids=["small-batches", "odd-chunks", "preempting"],
)
def test_batches_blocks_chunks_order_and_preemption_change_no_token(
    smollm2: Path, bench_prompts: list[str], bench_results: list[Any], options: dict[str, Any]
) -> None:
    order = torch.randperm(64, generator=torch.Generator().manual_seed(1)).tolist()
    results = complete(smollm2, [bench_prompts[i] for i in order], 128, **options)
    for i, result in zip(order, results, strict=True):
        assert result.token_ids == bench_results[i].token_ids
    assert (sum(result.num_preemptions for result in results) > 0) == ("kv_cache_memory" in options)
