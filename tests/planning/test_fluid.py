"""Jobs as a flow against the same jobs by the real scheduler, step by step."""

import random
from collections.abc import Iterator

import numpy as np
import pytest

from batchinfer.config import JobConfig
from batchinfer.planning.forecast import JobShape
from batchinfer.planning.job_rows import JobRows
from batchinfer.planning.prefixes import PrefixTally
from batchinfer.planning.simulation import CacheBlocks
from batchinfer.planning.step_trace import Forecast
from batchinfer.request import Request, RequestId, SamplingParams

LONGEST = 4096


def request(row: int, prompt: list[int], max_tokens: int) -> Request:
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    return Request(RequestId(0, row), np.array(prompt, np.int32), params, max_tokens, noise_key=row)


def job(kind: str) -> Iterator[Request]:
    rng = random.Random(kind)

    def tokens(count: int) -> list[int]:
        return [rng.randrange(50_000) for _ in range(count)]

    prefixes = [tokens(160) for _ in range(5)]
    for row in range(120 if kind == "long prompts" else 240):
        if kind == "uniform":
            yield request(row, tokens(60), 50)
        elif kind == "heavy tail":
            yield request(row, tokens(rng.randrange(8, 200)), min(400, int(10 * rng.paretovariate(1.2))))
        elif kind == "shared prefixes":
            yield request(row, rng.choice(prefixes) + tokens(30), 40)
        elif kind == "scores":
            yield request(row, tokens(rng.randrange(50, 150)), 0)
        else:
            yield request(row, tokens(rng.randrange(500, 2000)), 20)


def both(kind: str, blocks: CacheBlocks, **options: object) -> tuple[Forecast, Forecast]:
    rows = JobRows(0, 1, prefixes=PrefixTally(blocks.block_size))
    for one in job(kind):
        rows.add(one, one.max_tokens)
    rows.num_rows = rows.num_read
    config, shape = JobConfig.from_options(options), JobShape(rows, {None: 1})
    exact = shape.exact(config, blocks, LONGEST)
    assert exact is not None
    return exact, shape.flow(config, blocks, LONGEST)


def total(forecast: Forecast, name: str) -> float:
    return float(getattr(forecast.trace, name) @ forecast.trace.repeats)


@pytest.mark.parametrize("kind", ["uniform", "heavy tail", "shared prefixes", "long prompts", "scores"])
@pytest.mark.parametrize(("admission", "order"), [("forecast", "packed"), ("forecast", "input"), ("greedy", "input")])
def test_with_room_enough(kind: str, admission: str, order: str) -> None:
    exact, flow = both(kind, CacheBlocks(10_000, 16, True), max_num_seqs=48, admission=admission, order=order)
    assert flow.trace.steps == pytest.approx(exact.trace.steps, rel=0.02)
    assert flow.trace.peak_blocks == pytest.approx(exact.trace.peak_blocks, rel=0.05)
    assert flow.trace.mean_sequences == pytest.approx(exact.trace.mean_sequences, rel=0.05)
    assert total(flow, "tokens") == pytest.approx(total(exact, "tokens"), rel=0.01)
    assert total(flow, "samples") == total(exact, "samples") == exact.output_tokens
    assert total(flow, "pairs") == pytest.approx(total(exact, "pairs"), rel=0.03)
    assert total(flow, "cache_tokens") == pytest.approx(total(exact, "cache_tokens"), rel=0.05)
    assert flow.cached_tokens == exact.cached_tokens
    assert flow.preemptions == exact.preemptions == 0


@pytest.mark.parametrize("kind", ["uniform", "heavy tail", "shared prefixes"])
def test_what_is_computed_again_is_what_is_computed_beyond_once(kind: str) -> None:
    """The last token of an answer is never computed."""
    exact, _ = both(kind, CacheBlocks(100, 16, True), max_num_seqs=48, admission="greedy", order="input")
    once = sum(request.num_prompt_tokens + request.max_tokens - 1 for request in job(kind)) - exact.cached_tokens
    assert exact.preemptions > 0
    assert exact.recomputed_tokens == total(exact, "tokens") - once > 0


@pytest.mark.parametrize("kind", ["uniform", "heavy tail"])
@pytest.mark.parametrize("admission", ["forecast", "greedy"])
def test_with_little_memory(kind: str, admission: str) -> None:
    exact, flow = both(kind, CacheBlocks(220, 16, True), max_num_seqs=64, admission=admission)
    assert flow.trace.steps == pytest.approx(exact.trace.steps, rel=0.1)
    assert flow.trace.peak_blocks == pytest.approx(exact.trace.peak_blocks, rel=0.06)
    assert flow.trace.mean_sequences == pytest.approx(exact.trace.mean_sequences, rel=0.1)
    assert total(flow, "tokens") == pytest.approx(total(exact, "tokens"), rel=0.05)
    assert (flow.preemptions > 10) == (exact.preemptions > 10)


@pytest.mark.parametrize("options", [{"batching": "static"}, {"kv_allocation": "contiguous"}])
def test_the_ways_that_are_there_for_comparison(options: dict[str, str]) -> None:
    exact, flow = both("heavy tail", CacheBlocks(2600, 16, True), max_num_seqs=32, order="input", **options)
    assert flow.trace.steps == pytest.approx(exact.trace.steps, rel=0.03)
    assert flow.trace.mean_sequences == pytest.approx(exact.trace.mean_sequences, rel=0.05)
    assert flow.trace.peak_blocks == pytest.approx(exact.trace.peak_blocks, rel=0.05)
