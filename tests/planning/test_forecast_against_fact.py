"""What plan says of a job against what a run of it does, on five kinds of jobs and a real engine with a tiny model."""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_jobs import save_tiny_model, write_jsonl

from batchinfer import roofline
from batchinfer.options import EffectiveOptions
from batchinfer.pipeline import bench_throughput
from batchinfer.planning.plan import PlanRequest, plan_job


@pytest.fixture(autouse=True)
def _apart(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    threads = torch.get_num_threads()
    monkeypatch.setattr(roofline, "profile_path", lambda: tmp_path / "profile.json")
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"), context=1024)


def words(rng: random.Random, count: int) -> str:
    """A text of that many bytes, which are the tokens of the tiny model."""
    return "".join(rng.choice("abcdefghij ") for _ in range(count))


def rows_of(kind: str) -> list[dict[str, Any]]:
    rng = random.Random(kind)
    if kind == "uniform":
        return [{"prompt": words(rng, 40), "max_tokens": 30} for _ in range(64)]
    if kind == "heavy tail":
        lengths = [min(300, int(8 * rng.paretovariate(1.1))) for _ in range(64)]
        return [{"prompt": words(rng, rng.randrange(8, 80)), "max_tokens": length} for length in lengths]
    if kind == "shared prefixes":
        prefixes = [words(rng, 200) for _ in range(6)]
        return [{"prompt": rng.choice(prefixes) + words(rng, 20), "max_tokens": 20} for _ in range(64)]
    if kind == "tight memory":
        return [{"prompt": words(rng, 60), "max_tokens": rng.randrange(20, 120)} for _ in range(40)]
    return [{"prompt": words(rng, rng.randrange(300, 800)), "max_tokens": 10} for _ in range(24)]


def options(model: Path, source: Path, **values: Any) -> EffectiveOptions:
    given = {"input": (str(source),), "model": str(model), "dtype": "fp32", "device": "cpu", "threads": 1}
    return EffectiveOptions.resolve({**given, "ignore_eos": True, "temperature": 0.0, **values})


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        ("uniform", {"max_num_seqs": 16}),
        ("heavy tail", {"max_num_seqs": 16}),
        ("shared prefixes", {"max_num_seqs": 16, "kv_cache_memory": 500 << 10}),
        ("tight memory", {"max_num_seqs": 32, "kv_cache_memory": 500 << 10}),
        ("long prompts", {"max_num_seqs": 8, "max_num_batched_tokens": 512}),
    ],
)
def test_peak_memory_and_steps_are_as_forecast(model: Path, tmp_path: Path, kind: str, values: dict[str, Any]) -> None:
    source = write_jsonl(tmp_path / "rows.jsonl", rows_of(kind))
    given = options(model, source, **({"kv_cache_memory": 64 << 20} | values))
    plan = plan_job(given, PlanRequest(), lambda line: None)
    fact = bench_throughput(given)
    assert plan["method"] == "exact"
    assert plan["kv_blocks"]["total"] == fact["kv_blocks"]["total"]
    assert plan["kv_blocks"]["peak"] == pytest.approx(fact["kv_blocks"]["peak"], rel=0.05)
    assert plan["steps"] == pytest.approx(fact["steps"], rel=0.1)
    assert plan["concurrency"]["mean"] == pytest.approx(fact["batch_size"]["mean"], rel=0.1)
    assert plan["output_tokens"]["expected"] == fact["completion_tokens"]
    assert plan["prompt_tokens"]["total"] == fact["prompt_tokens"]
    assert plan["cached_tokens"] == pytest.approx(fact["cached_prompt_tokens"], rel=0.05)
    assert plan["memory"]["cache_bytes"] == fact["kv_cache_bytes"]
