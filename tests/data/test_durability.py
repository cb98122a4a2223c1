"""Faults at every operation on the device, and SIGKILLs: the next run gives exactly the undisturbed output."""

import itertools
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from faulty_storage import Died, Fault, install
from output_jobs import answer, is_finished, make_job, open_writer, prompts, read_output, run_job, wanted_rows

from batchinfer.data import journal
from batchinfer.data.writer import OutputJob, OutputWriter
from batchinfer.errors import BatchInferError, UsageError

TABLES = [prompts("a", "b", "a"), prompts("a", "c")]
SAMPLES = {(0, 1): 2}  # the row with several samples
ORDER = [(1, 1), (0, 1), (0, 2), (1, 0), (0, 0)]  # parts fill up out of order


def _samples(row: tuple[int, int]) -> range:
    return range(SAMPLES.get(row, 1))


def _answer_all(target: Path, job: OutputJob, run: str, safe: list[tuple[int, int]], overwrite: bool = False) -> None:
    """Answer and finish; `safe` gets each row once a flush that covers it has returned."""
    writer = open_writer(target, job, overwrite)
    try:
        wanted = set(wanted_rows(writer, job))
        for row in (row for row in ORDER if row in wanted):
            writer.expect(*row, num_samples=len(_samples(row)))
            writer.add([answer(*row, sample, text=f"{run} {row} {sample}") for sample in _samples(row)])
            writer.drain()
            safe.append(row)
        writer.finish({"run": run})
    finally:
        writer.close()


def _check_output(target: Path, safe: list[tuple[int, int]]) -> None:
    """Each sample of each row once, in order, with its own input; rows that were safe have their first answer."""
    rows = read_output(target)
    places = [(s, r, k) for s, table in enumerate(TABLES) for r in range(table.num_rows) for k in _samples((s, r))]
    assert [row["request_id"] for row in rows] == [f"{s}-{r}-{k}" for s, r, k in places]
    for (shard, number, sample), row in zip(places, rows, strict=True):
        assert row["prompt"] == TABLES[shard]["prompt"][number].as_py()
        assert row["id"] == number
        expected = f"{(shard, number)} {sample}"
        assert row["completion"] in {f"first {expected}", f"second {expected}"}
        if (shard, number) in safe:
            assert row["completion"] == f"first {expected}"


def _check_whole_files(target: Path) -> None:
    for part in target.glob("part-*.parquet"):
        assert pq.read_table(part).num_rows > 0


def _names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def _run_with_fault(
    monkeypatch: pytest.MonkeyPatch, fault: Fault, fail_at: int, target: Path, job: OutputJob, overwrite: bool = False
) -> tuple[bool, list[tuple[int, int]]]:
    """(whether the fault was met, rows that were safe by then) of a first run."""
    safe: list[tuple[int, int]] = []
    with monkeypatch.context() as patch:
        made = install(patch, fault, fail_at)
        patch.setattr(journal, "_FAN_OUT", 2)
        try:
            _answer_all(target, job, "first", safe, overwrite)
        except Died:
            assert fault != "error"
        except BatchInferError as e:
            assert fault == "error" and _is_advice(str(e)), e  # noqa: PT017, PT018 - most runs raise, the last does not
    return made[0].has_failed, safe


def _is_advice(message: str) -> bool:
    return "No space left on device" in message and "run the same command again" in message


def _carry_on(target: Path, job: OutputJob, safe: list[tuple[int, int]]) -> None:
    _check_whole_files(target)
    if not is_finished(target, job):
        _answer_all(target, job, "second", [])
    _check_output(target, safe)
    assert is_finished(target, job)


_DIRECTORY = {"_SUCCESS", "_manifest.json", "_stats.json"} | {f"part-{i:05d}.parquet" for i in range(3)}
_FILES = {"out.parquet", "out.parquet.manifest.json", "out.parquet.stats.json"}


@pytest.fixture
def _no_waiting_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a crash leaves behind is simulated, so the device need not really be waited for."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


ALL_MOMENTS = pytest.param(1, 1, marks=pytest.mark.slow, id="every-operation")
SOME_MOMENTS = [pytest.param(2, 9, id="some"), ALL_MOMENTS]


@pytest.mark.usefixtures("_no_waiting_for_the_disk")
@pytest.mark.parametrize(("first", "stride"), SOME_MOMENTS)
@pytest.mark.parametrize("fault", ["error", "death", "power"])
def test_any_single_fault_loses_and_doubles_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, fault: Fault, first: int, stride: int
) -> None:
    job = make_job(TABLES)
    for fail_at in itertools.count(first, stride):
        target = tmp_path / str(fail_at)
        is_met, safe = _run_with_fault(monkeypatch, fault, fail_at, target, job)
        _carry_on(target, job, safe)
        assert _names(target) == _DIRECTORY
        if not is_met:
            break
    assert fail_at > 60  # a run has more operations than this


@pytest.mark.usefixtures("_no_waiting_for_the_disk")
@pytest.mark.parametrize(("first", "stride"), SOME_MOMENTS)
@pytest.mark.parametrize("fault", ["error", "power"])
def test_any_single_fault_with_a_single_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, fault: Fault, first: int, stride: int
) -> None:
    job = make_job(TABLES, rows_per_part=4)
    for fail_at in itertools.count(first, stride):
        folder = tmp_path / str(fail_at)
        is_met, safe = _run_with_fault(monkeypatch, fault, fail_at, folder / "out.parquet", job)
        _carry_on(folder / "out.parquet", job, safe)
        assert _names(folder) == _FILES
        if not is_met:
            break
    assert fail_at > 60


@pytest.mark.usefixtures("_no_waiting_for_the_disk")
@pytest.mark.parametrize(("first", "stride"), [pytest.param(4, 5, id="some"), ALL_MOMENTS])
@pytest.mark.parametrize("fault", ["death", "power"])
def test_a_fault_while_overwriting_never_mixes_two_jobs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, fault: Fault, first: int, stride: int
) -> None:
    old_job = make_job([prompts("x", "y", "z", "w", "v", "u"), prompts("t")])
    job = make_job(TABLES)
    run_job(tmp_path / "old", old_job)
    for fail_at in range(first, 30, stride):
        target = tmp_path / str(fail_at)
        shutil.copytree(tmp_path / "old", target)
        is_met, safe = _run_with_fault(monkeypatch, fault, fail_at, target, job, overwrite=True)
        assert is_met
        if _belongs_to(target, old_job):
            assert safe == []  # it ended before the output was bound to the new job
            _answer_all(target, job, "second", [], overwrite=True)
        _carry_on(target, job, safe)


def _belongs_to(target: Path, job: OutputJob) -> bool:
    try:
        return is_finished(target, job)
    except UsageError:
        return False


_SCRIPT = """
import sys, time
sys.path.insert(0, {here!r})
from output_jobs import answer, make_job, open_writer, prompts, wanted_rows
target, log = sys.argv[1:]
job = make_job([prompts(*["same prompt"] * 150), prompts(*map(str, range(50)))], rows_per_part=30)
with open_writer(target, job) as writer, open(log, "a", buffering=1) as log_file:
    for shard, row in wanted_rows(writer, job):
        time.sleep(0.01)
        writer.add([answer(shard, row)])
        print(shard, row, time.time(), file=log_file)
    writer.finish({{}})
"""


def test_sigkill_at_random_moments(tmp_path: Path) -> None:
    """Cases 11, 14, 17: 200 rows with equal prompts, killed at random: 200 answers, by place; what was finished a
    second before a kill is not computed again."""
    command = [sys.executable, "-c", _SCRIPT.format(here=os.path.dirname(__file__)), tmp_path / "out", tmp_path / "log"]
    moments = random.Random(0)
    kills: list[float] = []
    while not (tmp_path / "out" / "_SUCCESS").exists():
        process = subprocess.Popen(command)
        if len(kills) < 2:
            _wait_for_lines(tmp_path / "log", process)
            time.sleep(moments.uniform(0.0, 1.4))
            process.send_signal(signal.SIGKILL)
            kills.append(time.time())
        assert process.wait(timeout=60) in (0, -signal.SIGKILL)
        _check_whole_files(tmp_path / "out")
    rows = read_output(tmp_path / "out")
    places = [(0, r) for r in range(150)] + [(1, r) for r in range(50)]
    assert [row["completion"] for row in rows] == [f"answer {s}/{r}/0" for s, r in places]
    assert not _computed_again(tmp_path / "log", kills)


def _wait_for_lines(log: Path, process: "subprocess.Popen[bytes]") -> None:
    before = log.stat().st_size if log.exists() else 0
    while process.poll() is None and (not log.exists() or log.stat().st_size == before):
        time.sleep(0.01)


def _computed_again(log: Path, kills: list[float]) -> list[tuple[str, str]]:
    """Rows that a run computed although an earlier run had finished them more than a second before its kill."""
    entries = [(tuple(line.split()[:2]), float(line.split()[2])) for line in log.read_text().splitlines()]
    return [
        row
        for i, (row, at) in enumerate(entries)
        for earlier, then in entries[:i]
        if earlier == row and any(then + 1.0 < kill < at for kill in kills)
    ]


def test_rows_reach_the_journal_within_a_second_without_any_further_call(tmp_path: Path) -> None:
    with open_writer(tmp_path / "out", make_job(TABLES)) as writer:
        started = time.monotonic()
        writer.add([answer(0, 0)])
        while not list((tmp_path / "out" / "_work").glob("journal-*/*.arrow")):
            assert time.monotonic() - started < 1.0
            time.sleep(0.01)
        assert isinstance(writer, OutputWriter)
