"""Greedy tokens of the default model equal Hugging Face's in float32, however the engine batches and preempts."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from filelock import FileLock
from hugging_face import HuggingFaceOracle

from batchinfer import LLM, SamplingParams
from batchinfer.request import Result

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


def complete(smollm2: Path, prompts: list[str], max_tokens: int, **options: Any) -> list[Result]:
    llm = LLM(model=str(smollm2), dtype="fp32", **options)
    return llm.generate(prompts, SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True))


def assert_greedy(oracle: HuggingFaceOracle, prompts: list[str], completions: list[list[int]]) -> None:
    ties = []
    for index, (prompt, token_ids) in enumerate(zip(prompts, completions, strict=True)):
        gaps = oracle.gaps(oracle.encode(prompt), token_ids)
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
    completions = [result.token_ids for result in complete(smollm2, prompts, 32)]
    assert [len(token_ids) for token_ids in completions] == [32] * len(prompts)
    assert_greedy(oracle, prompts, completions)
    assert completions[0] == oracle.generate(oracle.encode(prompts[0]), 32)


@pytest.fixture(scope="module")
def bench_prompts(bench_rows: Callable[[str, int], Any]) -> list[str]:
    return [row["prompt"] for row in bench_rows("short.parquet", 64)]


@pytest.fixture(scope="module")
def bench_completions(smollm2: Path, bench_prompts: list[str], common_folder: Path) -> list[list[int]]:
    """Token ids, which the first of several workers computes."""
    file = common_folder / "bench_completions.json"
    with FileLock(f"{file}.lock"):
        if not file.exists():
            file.write_text(json.dumps([result.token_ids for result in complete(smollm2, bench_prompts, 128)]))
    return json.loads(file.read_text())


@pytest.mark.slow
def test_64_bench_prompts_equal_hugging_face(
    oracle: HuggingFaceOracle, bench_prompts: list[str], bench_completions: list[list[int]]
) -> None:
    assert [len(token_ids) for token_ids in bench_completions] == [128] * 64
    assert_greedy(oracle, bench_prompts, bench_completions)


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
    smollm2: Path, bench_prompts: list[str], bench_completions: list[list[int]], options: dict[str, Any]
) -> None:
    order = torch.randperm(64, generator=torch.Generator().manual_seed(1)).tolist()
    results = complete(smollm2, [bench_prompts[i] for i in order], 128, **options)
    for i, result in zip(order, results, strict=True):
        assert result.token_ids == bench_completions[i]
    assert (sum(result.num_preemptions for result in results) > 0) == ("kv_cache_memory" in options)
