"""Perplexity of the default model through prompt_logprobs: 16-bit KV against the figure measured with transformers, and
what fp8 KV costs. Each text alone, no BOS, consecutive windows of 512 targets, inputs under 16 ids dropped."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from batchinfer import LLM, SamplingParams
from batchinfer.data.tokenizer import Tokenizer

WINDOW = 512
TRANSFORMERS_BF16 = 34.96


def windows(path: Path, texts: list[str]) -> list[list[int]]:
    encoded = [ids.tolist() for ids in Tokenizer.load(path).encode_batch(texts, add_special_tokens=False)]
    pieces = [ids[start : start + WINDOW + 1] for ids in encoded for start in range(0, len(ids) - 1, WINDOW)]
    return [piece for piece in pieces if len(piece) - 1 >= 16]


def perplexity(path: Path, prompts: list[list[int]], **options: Any) -> float:
    llm = LLM(model=str(path), dtype="bf16", **options)
    results = llm.generate(prompts, SamplingParams(max_tokens=0, prompt_logprobs=True))
    scores = [result.prompt_logprobs for result in results]
    assert [score.count for score in scores] == [len(prompt) - 1 for prompt in prompts]
    return math.exp(-sum(score.sum for score in scores) / sum(score.count for score in scores))


@pytest.mark.slow
def test_perplexity_of_16_bit_and_of_fp8_kv(smollm2: Path, bench_rows: Callable[[str, int], Any]) -> None:
    texts = [row["text"] for row in bench_rows("evaluation_text.parquet", 10_000)]
    prompts = windows(smollm2, texts)
    bf16 = perplexity(smollm2, prompts)
    fp8 = perplexity(smollm2, prompts, kv_cache_dtype="fp8")
    print(f"perplexity: bf16 KV {bf16:.3f}, fp8 KV {fp8:.3f}")
    assert bf16 == pytest.approx(TRANSFORMERS_BF16, rel=0.002)
    assert fp8 == pytest.approx(bf16, rel=0.01)
