"""The profile of single steps: what is counted where, and what does not fit."""

from types import SimpleNamespace

import pytest
import torch
from tiny_jobs import save_tiny_model

from batchinfer.config import JobConfig
from batchinfer.errors import UsageError
from batchinfer.executors import step_profile
from batchinfer.executors.step_profile import OperationTimer, StepShape, profile_steps, step_table

NAMES = {"matmul", "attention", "rotary and kv_store", "norms", "gated activation", "sampling", "rest"}


@pytest.fixture(autouse=True)
def keep_threads():
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(save_tiny_model(tmp_path_factory.mktemp("model"), context=128))


def options(model, **values):
    return JobConfig.from_options({"model": model, "device": "cpu", "threads": 1, "kv_cache_memory": 1 << 20, **values})


def inner(clock):
    clock.seconds += 2


def outer(clock):
    inner(clock)
    clock.seconds += 1


def test_time_within_watched_functions_counts_once(monkeypatch):
    clock = SimpleNamespace(seconds=0.0)
    monkeypatch.setattr(step_profile, "time", SimpleNamespace(perf_counter=lambda: clock.seconds))
    with OperationTimer({outer: "a", inner: "b"}) as timer:
        outer(clock)
        inner(clock)
        clock.seconds += 5
    assert timer.milliseconds == {"a": 3000, "b": 2000}  # the inner one within the outer is no operation of its own


def test_steps_of_a_model_are_those_asked_for(model):
    shape = StepShape(num_seqs=6, context=20, prefill_tokens=50)
    figures = profile_steps(options(model), shape, lambda line: None)
    assert figures["prefill"]["num_tokens"] == 50
    assert figures["decode"]["num_tokens"] == 6
    for kind in ("prefill", "decode"):
        step = figures[kind]
        assert set(step["operations_ms"]) == NAMES
        assert all(ms > 0 for ms in step["operations_ms"].values())
        assert sum(step["operations_ms"].values()) == pytest.approx(step["watched_ms"])
    assert figures["matmul_gflops"] > 0
    table = step_table(figures)
    assert "prefill step of 50 tokens" in table
    assert "decode step of 6 tokens" in table
    assert all(name in table for name in NAMES)


def test_parts_add_up_to_the_time_of_the_steps_they_were_watched_in(monkeypatch):
    """Plain steps take 50 ms; watched ones 70, 61, 90, 65, 63, 400 and 64 by turns: those of 64, 65 and 70 count."""
    wholes = iter([70.0, 61.0, 90.0, 65.0, 63.0, 400.0, 64.0])
    products = iter([30.0, 60.0, 10.0, 35.0, 60.0, 10.0, 34.0])
    is_watched = []

    class Timer:
        def __enter__(self):
            is_watched.append(True)
            self.milliseconds = {"matmul": next(products)}
            return self

        def __exit__(self, *_):
            return None

    monkeypatch.setattr(step_profile, "OperationTimer", lambda operations: Timer())
    monkeypatch.setattr(
        step_profile, "_milliseconds", lambda run: next(wholes) if is_watched and is_watched.pop() else 50.0
    )
    figures = step_profile._profile(lambda: None, 8)
    assert figures["step_ms"] == 50.0
    assert figures["watched_ms"] == pytest.approx((64 + 65 + 70) / 3)
    assert figures["operations_ms"] == {"matmul": pytest.approx(33), "rest": pytest.approx((64 + 65 + 70) / 3 - 33)}
    lines = step_table({"prefill": figures, "decode": figures, "matmul_gflops": 1.0}).splitlines()
    assert lines[1].strip() == "while the operations are watched: 66.3 ms, of which"
    assert [line.split()[1] for line in lines[2:4]] == ["33.3", "33.0"]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"num_seqs": 0}, "num_seqs = 0: must be 1 or more"),
        ({"context": 65}, "prefill_tokens = 64: must be at least context, and above num_seqs"),
        ({"num_seqs": 64}, "prefill_tokens = 64: must be at least context, and above num_seqs"),
    ],
)
def test_refuses_shapes_that_cannot_be(values, message):
    with pytest.raises(ValueError, match=message):
        StepShape(**{"num_seqs": 2, "context": 16, "prefill_tokens": 64, **values})


def test_refuses_a_context_beyond_the_model(model):
    shape = StepShape(num_seqs=2, context=120, prefill_tokens=200)
    with pytest.raises(UsageError, match="exceeds max_model_len"):
        profile_steps(options(model), shape, lambda line: None)
