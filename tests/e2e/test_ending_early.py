"""Signals, --deadline and --max-errors on whole jobs: exit codes, what is kept, and that the same command carries
on."""

import json
import os
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest
from tiny_jobs import call, read_rows, start, write_jsonl

from batchinfer import pipeline
from batchinfer.data.writer import OutputWriter
from batchinfer.engine.engine import Engine
from batchinfer.executors import loop
from batchinfer.process import StopSignals


@pytest.fixture
def long_job(tmp_path: Path) -> list[object]:
    """Options of a job of some seconds."""
    rows = [{"id": i, "prompt": f"row {i}", "max_tokens": 100, "ignore_eos": True} for i in range(40)]
    path = write_jsonl(tmp_path / "in.jsonl", rows)
    return ["--input", path, "--output", tmp_path / "out", "--max-num-seqs", 4, "--temperature", 1]


def wait_for_rows(process: "subprocess.Popen[str]", output: Path) -> None:
    while not list(output.glob("_work/journal-*/*.arrow")):
        assert process.poll() is None, process.communicate()[1]
        time.sleep(0.02)


def test_a_signal_ends_the_job_in_order_and_the_same_command_carries_on(
    tmp_path: Path, tiny_model: Path, long_job: list[object]
) -> None:
    process = start(tiny_model, *long_job)
    wait_for_rows(process, tmp_path / "out")
    process.send_signal(signal.SIGTERM)
    sent = time.monotonic()
    _, message = process.communicate(timeout=30)
    assert process.returncode == 75
    assert time.monotonic() - sent < 5
    assert "interrupted; the same command carries on" in message
    assert "Traceback" not in message
    answered = int(message.split("carries on (")[1].split()[0])
    assert 0 < answered < 40

    assert call(tiny_model, *long_job, "--max-num-seqs", 40) == 0
    assert [row["id"] for row in read_rows(tmp_path / "out")] == list(range(40))
    stats = json.loads((tmp_path / "out" / "_stats.json").read_text())
    assert stats["rows"] == 40
    assert stats["rows_resumed"] == answered


@pytest.mark.parametrize("second", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_ends_the_job_at_once(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch, long_job: list[object], second: signal.Signals
) -> None:
    steps: list[int] = []
    step = Engine.step

    def interrupted_step(self: Engine) -> list[object]:
        steps.append(1)
        if len(steps) == 20:
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), second)
            time.sleep(10)  # the second one does not wait for the step
        return step(self)

    monkeypatch.setattr(Engine, "step", interrupted_step)
    started = time.monotonic()
    assert call(tiny_model, *long_job) == 75
    assert time.monotonic() - started < 8
    assert len(steps) == 20


def test_a_signal_while_the_model_loads_does_not_wait(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch, long_job: list[object]
) -> None:
    def load(*_: object) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(10)

    with monkeypatch.context() as patch:
        patch.setattr(pipeline, "load_model", load)
        started = time.monotonic()
        assert call(tiny_model, *long_job) == 75
        assert time.monotonic() - started < 5
    assert not (tmp_path / "out" / "_SUCCESS").exists()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_a_signal_while_the_output_is_finished_leaves_it_resumable(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_jsonl(tmp_path / "in.jsonl", [{"prompt": f"row {i}"} for i in range(5)])
    options = ["--input", path, "--output", tmp_path / "out", "--max-tokens", 3]
    finish = OutputWriter.finish

    def interrupted_finish(self: OutputWriter, stats: dict[str, object]) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        finish(self, stats)

    with monkeypatch.context() as patch:
        patch.setattr(OutputWriter, "finish", interrupted_finish)
        assert call(tiny_model, *options) == 75
    with monkeypatch.context() as patch:
        patch.setattr(Engine, "add", None)  # no row is computed again
        assert call(tiny_model, *options) == 0
    assert len(read_rows(tmp_path / "out")) == 5


def test_signals_are_the_programs_own_again_afterwards() -> None:
    before = signal.getsignal(signal.SIGINT)
    with StopSignals() as outer, StopSignals() as inner:
        with inner.deferred():
            os.kill(os.getpid(), signal.SIGINT)
        assert inner.received
        assert not outer.received
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


class Clock:
    """Stands for the time module in the pipeline and in the loop that it drives."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


def test_after_the_deadline_no_row_starts_and_those_that_run_are_finished(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [{"prompt": f"row {i}", "max_tokens": 20, "ignore_eos": True, "n": 1 + i % 2} for i in range(40)]
    path = write_jsonl(tmp_path / "in.jsonl", rows)
    options = ["--input", path, "--output", tmp_path / "out", "--max-num-seqs", 5]
    clock, step = Clock(), Engine.step

    def timed_step(self: Engine) -> list[object]:
        clock.now += 1.0
        return step(self)

    with monkeypatch.context() as patch:
        patch.setattr(pipeline, "time", clock)
        patch.setattr(loop, "time", clock)
        patch.setattr(Engine, "step", timed_step)
        assert call(tiny_model, *options, "--deadline", "10s") == 75
    # Rows 0 to 2 have 1, 2, 1 samples, which leaves one place for the first sample of row 3: its second one is to be
    # finished too, as a part of an answer would be of no use. All start in the first step and take 20 steps of 1 s.
    assert clock.now < 100 + 2 * 20 + 2
    assert call(tiny_model, *options) == 0
    stats = json.loads((tmp_path / "out" / "_stats.json").read_text())
    assert stats["rows_resumed"] == 4
    assert len(read_rows(tmp_path / "out")) == 60


def test_a_signal_while_rows_are_finished_after_the_deadline_ends_the_job(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch, long_job: list[object]
) -> None:
    clock, step = Clock(), Engine.step

    def timed_step(self: Engine) -> list[object]:
        clock.now += 1.0
        if clock.now == 120:
            os.kill(os.getpid(), signal.SIGTERM)
        return step(self)

    monkeypatch.setattr(pipeline, "time", clock)
    monkeypatch.setattr(loop, "time", clock)
    monkeypatch.setattr(Engine, "step", timed_step)
    assert call(tiny_model, *long_job, "--deadline", "10s") == 75
    assert clock.now == 120


def faulty_rows(folder: Path) -> Path:
    """20 rows, of which the 3rd, 6th, … (6 of them) are errors."""
    return write_jsonl(folder / "in.jsonl", [{"prompt": f"{i}" if (i + 1) % 3 else None} for i in range(20)])


@pytest.mark.parametrize(("limit", "code"), [("6", 0), ("5", 3), ("30%", 0), ("29.9%", 3), ("0", 3), ("100%", 0)])
def test_max_errors(tmp_path: Path, tiny_model: Path, limit: str, code: int) -> None:
    options = ["--input", faulty_rows(tmp_path), "--output", tmp_path / "out", "--max-tokens", 2]
    assert call(tiny_model, *options, "--max-errors", limit) == code
    assert call(tiny_model, *options) == 0  # the limit does not bind the output
    assert sum(row["error_code"] == "null_prompt" for row in read_rows(tmp_path / "out")) == 6


def test_too_many_errors_end_a_job_before_its_other_rows(
    tmp_path: Path, tiny_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"prompt": None if i < 10 else "go on", "max_tokens": 200, "ignore_eos": True} for i in range(2000)]
    options = ["--input", write_jsonl(tmp_path / "in.jsonl", rows), "--output", tmp_path / "out", "--max-errors", "1"]
    assert call(tiny_model, *options) == 3
    told = "more rows failed than --max-errors allows; with another limit the same command carries on (10 of 2,000"
    assert told in capsys.readouterr().err
    assert call(tiny_model, *options) == 3  # errors of earlier runs count


def test_faulty_rows_alone_end_a_job_long_before_its_end(tmp_path: Path, tiny_model: Path, capsys) -> None:
    """No row ever reaches the engine, and still the limit is looked at."""
    source = write_jsonl(tmp_path / "in.jsonl", [{"prompt": None}] * 60_000)
    options = ["--input", source, "--output", tmp_path / "out", "--max-errors", "1"]
    assert call(tiny_model, *options) == 3
    said = capsys.readouterr().err
    answered = int(re.search(r"carries on \(([\d,]+) of 60,000", said)[1].replace(",", ""))
    assert answered < 30_000
