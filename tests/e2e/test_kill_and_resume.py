"""A job killed at random moments, and the same command again: the output of an undisturbed run, and nothing computed
twice."""

import contextlib
import random
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tiny_jobs import TIMES, call, read_rows, start, without_times, write_jsonl, write_parquet

Place = tuple[str, str]  # of a row's times: request id and column

BEAT_S = 0.05
# Logs when each row was finished, and that time passed for the process, in a job that is otherwise what the user runs.
LOG_FINISHED_ROWS = """
import threading, time
from batchinfer.data.writer import OutputWriter
log, add = open({log!r}, "a", buffering=1), OutputWriter.add
def beat():
    while True:
        print("beat", time.time(), file=log)
        time.sleep({beat_s})
def logged_add(self, results):
    add(self, results)
    for result in results:
        print(result.id, time.time(), file=log)
OutputWriter.add = logged_add
threading.Thread(target=beat, daemon=True).start()
"""


def write_inputs(folder: Path, scale: int) -> list[object]:
    """Options of a job: greedy, sampled and seeded rows, several samples, equal prompts, faulty rows of each kind, in
    shards of both formats."""
    tokens = random.Random(1)
    rows: list[dict[str, Any]] = []
    for i in range(30 * scale):
        row = {"id": i, "prompt": f"row {i % 7}", "max_tokens": tokens.randint(1, 120), "temperature": float(i % 3 > 0)}
        row |= {"n": 2} if i % 10 == 4 else {}
        row |= {"seed": i} if i % 6 == 1 else {}
        row |= {"prompt": None} if i % 15 == 7 else {}
        row |= {"top_p": 9.0} if i % 15 == 8 else {}
        row |= {"prompt": "x" * 300} if i % 15 == 9 else {}
        rows.append(row)
    first = write_jsonl(folder / "a.jsonl", rows)
    first.write_text(first.read_text().replace('{"id": 3,', '{"id": 3', 1))
    second = write_parquet(folder / "b.parquet", [row for row in rows if row["prompt"]][: 17 * scale])
    third = write_jsonl(folder / "c.jsonl", rows[:3])
    inputs = [option for path in (first, second, third) for option in ("--input", path)]
    return [*inputs, "--rows-per-part", 7, "--max-num-seqs", 6, "--logprobs", 2, "--output-token-ids", "--seed", 3]


def journaled_times(output: Path) -> dict[Place, Any]:
    """The times of all rows that are safe: in the journal or in a part."""
    work = output / "_work" if not output.suffix else Path(f"{output}.work")
    tables = [pq.read_table(path) for folder in (output, work) for path in sorted(folder.glob("part-*.parquet"))]
    for path in sorted(work.glob("journal-*/*.arrow")):
        with pa.ipc.open_file(path) as reader:
            tables.append(reader.read_all())
    return {(row["request_id"], name): row[name] for table in tables for row in table.to_pylist() for name in TIMES}


def run_with_kills(options: list[object], model: Path, output: Path, num_kills: int, log: Path) -> dict[Place, Any]:
    """Runs the job to its end; returns the times of the rows that were safe at some kill."""
    moments = random.Random(2)
    safe: dict[Place, Any] = {}
    kills = 0
    while True:
        log.unlink(missing_ok=True)
        prelude = LOG_FINISHED_ROWS.format(log=str(log), beat_s=BEAT_S)
        with log.with_suffix(".err").open("w") as messages:
            process = start(model, *options, prelude=prelude, stderr=messages)
        killed_at = wait_and_kill(process, log, moments) if kills < num_kills else 0.0
        code = process.wait(timeout=120)
        if code == 0:
            break
        kills += 1
        assert code == -signal.SIGKILL, log.with_suffix(".err").read_text()
        now = journaled_times(output)
        assert safe.items() <= now.items(), "a journaled row was lost or computed again"
        assert finished_a_second_before(log, killed_at) <= {request_id for request_id, _ in now}
        safe = now
    assert kills == num_kills, "the job was over before all kills; make it longer"
    return safe


def wait_and_kill(process: "subprocess.Popen[str]", log: Path, moments: random.Random) -> float:
    """The time of the kill. Some kills come before any row, most a while after this run has finished its first one."""
    if moments.random() < 0.15:
        time.sleep(moments.uniform(0.0, 2.0))
    else:
        while process.poll() is None and not has_finished_a_row(log):
            time.sleep(0.005)
        time.sleep(moments.uniform(0.0, 0.9))
    killed_at = time.time()
    process.kill()
    return killed_at


def read_log(log: Path) -> list[tuple[str, float]]:
    """(request id or "beat", time); a line that the kill cut short is left out."""
    if not log.exists():
        return []
    lines = log.read_text().splitlines(keepends=True)
    return [(line.split()[0], float(line.split()[1])) for line in lines if line.endswith("\n")]


def has_finished_a_row(log: Path) -> bool:
    return any(name != "beat" for name, _ in read_log(log))


def finished_a_second_before(log: Path, killed_at: float) -> set[str]:
    """Rows that had been finished for a second; time in which the process stood still does not count."""
    entries = read_log(log)
    beats = [at for name, at in entries if name == "beat"]
    gaps = [(last, now - last - 2 * BEAT_S) for last, now in zip(beats, [*beats, killed_at][1:], strict=True)]
    stalls = [(last, gap) for last, gap in gaps if gap > 0]
    return {
        name
        for name, at in entries
        if name != "beat" and killed_at - at - sum(gap for last, gap in stalls if last > at - 2 * BEAT_S) > 1.0
    }


def output_files(output: Path) -> dict[str, list[dict[str, Any]]]:
    paths = sorted(output.glob("part-*")) if output.is_dir() else [output]
    return {path.name: without_times(read_rows(path)) for path in paths}


@pytest.mark.parametrize(
    ("name", "num_kills", "scale"),
    [
        pytest.param("out", 3, 2),
        pytest.param("out", 20, 14, marks=pytest.mark.slow),
        pytest.param("out.jsonl", 5, 5, marks=pytest.mark.slow),
        pytest.param("out.parquet", 5, 5, marks=pytest.mark.slow),
    ],
)
def test_kills_lose_double_and_repeat_nothing(
    tmp_path: Path, tiny_model: Path, name: str, num_kills: int, scale: int
) -> None:
    options = write_inputs(tmp_path, scale)
    (tmp_path / "calm").mkdir()
    (tmp_path / "killed").mkdir()
    calm, killed = tmp_path / "calm" / name, tmp_path / "killed" / name
    assert call(tiny_model, *options, "--max-num-seqs", 64, "--output", calm) == 0
    safe = run_with_kills([*options, "--output", killed], tiny_model, killed, num_kills, tmp_path / "log")
    assert output_files(killed) == output_files(calm)
    final = {(row["request_id"], name): row[name] for row in read_rows(killed) for name in TIMES}
    assert safe
    assert safe.items() <= final.items()
    with contextlib.suppress(NotADirectoryError):
        assert {path.name for path in killed.iterdir()} == {path.name for path in calm.iterdir()}
