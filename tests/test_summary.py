"""The figures of _stats.json against sums worked out by hand, and the table at the end of a job."""

import json
from collections import Counter

import numpy as np
import pytest

from batchinfer.data.result_schema import Tally
from batchinfer.engine.stats import EngineStats
from batchinfer.errors import ErrorCode
from batchinfer.request import RequestId, RequestTimes, Result
from batchinfer.scheduler_output import SchedulerOutput
from batchinfer.summary import RequestStatistics, RunFigures, summarise, summary_table, with_earlier_runs


def answered(row: int, *, sample: int = 0, tokens: int = 10, latency_ms: float = 100.0, **changes) -> Result:
    times = RequestTimes(
        queue_ms=latency_ms / 10,
        prefill_ms=latency_ms / 10,
        ttft_ms=latency_ms / 5,
        tbt_mean_ms=8.0 if tokens > 1 else None,
        tbt_p50_ms=8.0 if tokens > 1 else None,
        tbt_p99_ms=9.0 if tokens > 1 else None,
        tbt_max_ms=10.0 + row if tokens > 1 else None,
        latency_ms=latency_ms,
    )
    values = {
        "finish_reason": "length",
        "text": "x",
        "token_ids": [1] * tokens,
        "prompt_tokens": 20,
        "cached_prompt_tokens": 16,
        "num_preemptions": 1,
        "times": times,
    }
    return Result(id=RequestId(0, row, sample), **{**values, **changes})


def failed(row: int, code: ErrorCode) -> Result:
    return Result(id=RequestId(0, row), finish_reason="error", error_code=code, error_message="no")


@pytest.fixture
def requests() -> RequestStatistics:
    statistics = RequestStatistics()
    for result in (
        answered(0),
        answered(0, sample=1, tokens=5),
        failed(1, ErrorCode.NULL_PROMPT),
        answered(2, tokens=1, finish_reason="stop"),
        failed(3, ErrorCode.PROMPT_TOO_LONG),
        failed(4, ErrorCode.NULL_PROMPT),
    ):
        statistics.add(result)
    return statistics


STEP_WORK = {
    "weight_bytes": 270_000_000,
    "kv_bytes_per_token": 23_040,
    "linear_flops_per_token": 212_336_640,
    "logits_flops_per_token": 56_623_104,
    "attention_flops_per_pair": 69_120,
    "dtype": "bf16",
}


def make_step(batch_size: int) -> SchedulerOutput:
    """Each sequence computes 5 tokens after 7, and samples one."""
    counts = np.full(batch_size, 5, np.int32)
    samples = np.ones(batch_size, np.bool_)
    return SchedulerOutput(0, (), (), (), np.arange(batch_size, dtype=np.int32), counts, counts + 2, samples)


def engine_figures(gaps=(8.0, 9.0, 40.0)) -> dict:
    """Twelve steps: eleven of two sequences and one of three, that ended with 20 blocks in use, but for one with 50."""
    stats = EngineStats(kv_blocks_total=200, schedule_s=0.5, forward_s=1.25, start_time=0.0, sampled_tokens=25)
    for step in range(12):
        stats.add_step(make_step(3 if step == 4 else 2), (), 4, 50 if step == 7 else 20)
    stats.add_token_gaps(np.array(gaps, np.float64))
    place = {"machine": "a processor", "threads": 3, "ended_at": "2026-01-31T07:08:09+00:00"}
    return {**stats.to_dict(), **place, "step_work": STEP_WORK}


def run_figures(**changes) -> RunFigures:
    values = {
        "rows_resumed": 0,
        "phase_seconds": {"startup": 3.2, "rows": 125.0},
        "busy_seconds": 2.0,
        "peak_memory_bytes": 3 * 2**29,
        "kv_cache_bytes": 24 * 2**20,
        "device": "cpu",
        "versions": {"torch": "2.13.0"},
        "options": {"seed": {"value": 0, "source": "default"}},
    }
    return RunFigures(**{**values, **changes})


def test_counts(requests):
    stats = requests.to_json()
    assert stats["rows"] == 5
    assert stats["completions"] == 6
    assert stats["finish_reasons"] == {"stop": 1, "length": 2, "error": 3}
    assert stats["errors_by_code"] == {"null_prompt": 2, "prompt_too_long": 1}
    assert requests.errors == 3
    assert stats["prompt_tokens"] == 60
    assert stats["cached_prompt_tokens"] == 48
    assert stats["completion_tokens"] == 16
    assert stats["preemptions"] == 3


def test_latencies_leave_out_what_has_none(requests):
    stats = requests.to_json()
    assert stats["ttft_ms"]["p50"] == pytest.approx(20.0)
    assert stats["tbt_mean_ms"]["mean"] == pytest.approx(8.0)
    assert stats["tbt_max_ms"]["max"] == pytest.approx(10.0)


def test_latency_percentiles_are_numpy_s():
    latencies = np.random.default_rng(3).gamma(2.0, 300.0, 500)
    statistics = RequestStatistics()
    for row, latency in enumerate(latencies):
        statistics.add(answered(row, latency_ms=float(latency)))
    figures = statistics.to_json()["latency_ms"]
    for name, share in (("p50", 50), ("p90", 90), ("p99", 99), ("max", 100)):
        assert figures[name] == pytest.approx(np.percentile(latencies, share))


def test_throughput_counts_answered_rows_over_the_busy_time(requests):
    stats = summarise(requests, engine_figures(), run_figures())
    assert stats["output_tokens_per_s"] == pytest.approx(16 / 2.0)
    assert stats["total_tokens_per_s"] == pytest.approx((60 + 16) / 2.0)


def test_a_job_with_nothing_left_to_do():
    stats = summarise(RequestStatistics(), engine_figures(gaps=()), run_figures(busy_seconds=0.0, rows_resumed=7))
    assert stats["output_tokens_per_s"] == 0
    assert stats["tbt_ms"]["p99"] is None
    table = summary_table(with_earlier_runs(stats, Tally(7, 7, Counter(stop=7), Counter(), 100, 10, 30)))
    assert "7, of which earlier runs answered 7\n" in table
    assert "\nthis run     0 rows, 0 in (0 cached), 0 out; all below is of it\n" in table


def test_counts_of_earlier_runs_are_added(requests):
    """So that the counts of a job that was killed are those of one that was not; times stay this run's."""
    stats = summarise(requests, engine_figures(), run_figures(rows_resumed=5))
    before = Tally(5, 6, Counter(stop=4, error=2), Counter(null_prompt=2), 100, 10, 30)
    whole = with_earlier_runs(stats, before)
    assert whole["rows"] == stats["rows"] + 5
    assert whole["finish_reasons"] == {"stop": 1 + 4, "length": 2, "error": 3 + 2}
    assert sum(whole["errors_by_code"].values()) == 5
    assert whole["errors_by_code"]["null_prompt"] == stats["errors_by_code"].get("null_prompt", 0) + 2
    assert whole["completion_tokens"] == stats["completion_tokens"] + 30
    assert whole["ttft_ms"] == stats["ttft_ms"]
    assert "\nerrors       5 (" in summary_table(whole)


def test_it_is_said_which_figures_are_of_all_runs_and_which_of_the_last(requests):
    """This run: 5 rows, 60 tokens in (48 cached) and 16 out in 2 s; the earlier one 5 rows, 100 (10) and 30."""
    stats = summarise(requests, engine_figures(), run_figures(rows_resumed=5))
    before = Tally(5, 6, Counter(stop=4, error=2), Counter(null_prompt=2), 100, 10, 30)
    whole = with_earlier_runs(stats, before)
    counts = {"rows", "completions", "prompt_tokens", "cached_prompt_tokens", "completion_tokens"}
    assert set(whole["of_all_runs"]) == set(whole["this_run"]) == counts | {"finish_reasons", "errors_by_code"}
    assert {
        name: whole["this_run"][name] for name in ("rows", "completions", "prompt_tokens", "completion_tokens")
    } == {
        "rows": 5,
        "completions": 6,
        "prompt_tokens": 60,
        "completion_tokens": 16,
    }
    assert whole["this_run"]["finish_reasons"] == {"stop": 1, "length": 2, "error": 3}
    assert whole["output_tokens_per_s"] == pytest.approx(whole["this_run"]["completion_tokens"] / 2.0)
    lines = summary_table(whole).split("\n")
    assert lines[0] == "rows         10 (12 completions), of which earlier runs answered 5"
    assert lines[2] == "tokens       160 in (58 cached), 46 out"
    assert lines[3] == "this run     5 rows, 60 in (48 cached), 16 out; all below is of it"
    assert lines[4] == "throughput   8.0 output tokens/s, 38.0 in all"
    assert "this run" not in summary_table(with_earlier_runs(stats | {"rows_resumed": 0}, Tally()))


def test_engine_and_run_figures_are_carried(requests):
    stats = summarise(requests, engine_figures(), run_figures())
    assert stats["batch_size"] == {"mean": pytest.approx(25 / 12), "peak": 3}
    assert stats["kv_blocks"] == {"total": 200, "peak": 50, "mean": 22.5}
    assert stats["steps"] == 12
    assert stats["engine_seconds"]["forward"] == 1.25
    assert stats["tbt_ms"]["max"] == 40.0
    assert stats["tbt_ms"]["p50"] == 9.0
    assert stats["wall_seconds"] == {"startup": 3.2, "rows": 125.0}
    assert stats["versions"] == {"torch": "2.13.0"}
    assert stats["options"]["seed"]["source"] == "default"


def test_work_and_timeline_are_carried(requests):
    """25 sequences of 12 tokens; the tokens at places 7 to 11 attend to 8 to 12 tokens."""
    stats = summarise(requests, engine_figures(), run_figures())
    counts = {"steps": 12, "scheduled_tokens": 125, "context_tokens": 300, "query_key_pairs": 25 * 50}
    assert stats["work"] == {**counts, "logits_tokens": 25, **STEP_WORK}
    assert (stats["machine"], stats["threads"]) == ("a processor", 3)
    assert stats["ended_at"] == "2026-01-31T07:08:09+00:00"
    assert stats["timeline"]["running_mean"] == [2, 2, 2, 2, 3, 2, 2, 2, 2, 2, 2, 2]
    assert stats["engine_seconds"].keys() == {"schedule", "forward", "sample", "postprocess"}


def test_stats_are_json(requests):
    stats = summarise(requests, engine_figures(), run_figures())
    assert json.loads(json.dumps(stats, allow_nan=False)) == stats


def test_table_names_the_figures_a_person_looks_for(requests):
    table = summary_table(summarise(requests, engine_figures(), run_figures()), output="x.completions")
    lines = {line[:13].strip(): line[13:] for line in table.split("\n")}
    assert lines["rows"] == "5 (6 completions)"
    assert lines["errors"] == "3 (null_prompt 2, prompt_too_long 1)"
    assert lines["tokens"] == "60 in (48 cached), 16 out"
    assert lines["throughput"] == "8.0 output tokens/s, 38.0 in all"
    assert lines["time"] == "startup 3.2 s, rows 2m 05s"
    assert lines["TBT"] == "p50 9 ms  p90 33.8 ms  p99 39.4 ms  max 40 ms"
    assert lines["KV cache"] == "24 MiB, 25% of 200 blocks used at the peak, 3 preemptions"
    assert lines["peak memory"] == "1.5 GiB"
    assert lines["output"] == "x.completions"
    assert max(map(len, table.split("\n"))) <= 100
