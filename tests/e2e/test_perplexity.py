"""Perplexity of the default model through prompt_logprobs: 16-bit KV against `evaluate`, and fp8 KV against the figure
measured with transformers. Each text alone, no BOS, consecutive windows of 512 targets, inputs under 16 ids dropped."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from batchinfer import LLM, SamplingParams
from batchinfer.cli import main as command_line
from batchinfer.data.tokenizer import Tokenizer

EVALUATION_TEXT = Path(__file__).resolve().parents[3] / "shared" / "bench" / "evaluation_text.parquet"
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
def test_fp8_kv_over_the_whole_text(smollm2: Path, bench_rows: Callable[[str, int], Any]) -> None:
    texts = [row["text"] for row in bench_rows(EVALUATION_TEXT.name, 10_000)]
    fp8 = perplexity(smollm2, windows(smollm2, texts), kv_cache_dtype="fp8")
    print(f"perplexity: fp8 KV {fp8:.3f}")
    assert fp8 == pytest.approx(TRANSFORMERS_BF16, rel=0.01)


@pytest.mark.slow
def test_16_bit_kv_scores_what_evaluate_does(
    smollm2: Path, bench_rows: Callable[[str, int], Any], tmp_path: Path
) -> None:
    """`evaluate`, which has a loop of its own, is held against transformers on the whole text."""
    texts = [row["text"] for row in bench_rows(EVALUATION_TEXT.name, 16)]
    file = tmp_path / "figures.json"
    options = ["--model", smollm2, "--text", EVALUATION_TEXT, "--limit", 16, "--json", file]
    assert command_line._run(["evaluate", *map(str, options)]) == 0
    found = json.loads(file.read_text())
    prompts = windows(smollm2, texts)
    assert found["tokens"] == sum(len(prompt) - 1 for prompt in prompts) > 8000
    assert perplexity(smollm2, prompts) == pytest.approx(found["perplexity"], rel=5e-4)
