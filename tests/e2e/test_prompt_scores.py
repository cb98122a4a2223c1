"""Prompts scored with max_tokens 0 equal Hugging Face's log-probabilities, and stand in the output's columns."""

from pathlib import Path

import pytest
import torch
from small_tokenizers import BOS, ids_of
from tiny_jobs import call, read_rows, write_jsonl

from batchinfer import LLM, SamplingParams

TEXTS = ["a", "hello, world", "the same beginning, then one end", "the same beginning, then another", "x" * 250]


@pytest.fixture(scope="module")
def expected(tiny_model: Path) -> list[torch.Tensor]:
    """Log-probability of each prompt token but the first, by transformers in float32."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32).eval()
    scores = []
    for text in TEXTS:
        ids = torch.tensor([BOS, *ids_of(text)])
        with torch.inference_mode():
            log_probs = model(ids[None]).logits[0].double().log_softmax(dim=-1)
        scores.append(log_probs[:-1].gather(1, ids[1:, None])[:, 0])
    return scores


@pytest.mark.parametrize("chunk", [2048, 7])
def test_scores_equal_hugging_face(tiny_model: Path, expected: list[torch.Tensor], chunk: int) -> None:
    llm = LLM(model=str(tiny_model), dtype="fp32", threads=1, max_num_batched_tokens=chunk)
    results = llm.generate(TEXTS, SamplingParams(max_tokens=0, prompt_logprobs=True))
    for result, scores in zip(results, expected, strict=True):
        assert (result.text, result.token_ids, result.finish_reason) == ("", [], "length")
        assert result.prompt_logprobs.count == len(scores)
        torch.testing.assert_close(
            torch.from_numpy(result.prompt_logprobs.per_token).double(), scores, atol=1e-4, rtol=0
        )
        assert result.prompt_logprobs.sum == pytest.approx(float(scores.sum()), abs=1e-3)


def test_scores_in_the_output(tiny_model: Path, expected: list[torch.Tensor], tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "in.jsonl", [{"prompt": text} for text in [*TEXTS, None]])
    options = ["--input", path, "--output", tmp_path / "out", "--max-tokens", 0, "--prompt-logprobs"]
    assert call(tiny_model, *options) == 0
    *rows, faulty = read_rows(tmp_path / "out")
    assert faulty["prompt_logprobs"] is None
    for row, scores in zip(rows, expected, strict=True):
        assert (row["completion"], row["completion_tokens"], row["ttft_ms"]) == ("", 0, None)
        assert row["latency_ms"] > 0
        assert row["prompt_logprobs"]["count"] == len(scores)
        assert row["prompt_logprobs"]["sum"] == pytest.approx(float(scores.sum()), abs=1e-3)
        assert row["prompt_logprobs"]["per_token"] == pytest.approx(scores.tolist(), abs=1e-4)
