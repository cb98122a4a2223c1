"""What the same command does with an output that stands there: carry on, nothing, or refuse; and what may change."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tiny_jobs import call, read_rows, save_tiny_model, without_times, write_jsonl

from batchinfer.cli import main as command_line
from batchinfer.engine.engine import Engine
from batchinfer.request import Result

ROWS = [{"id": i, "prompt": f"row {i}", "max_tokens": 12} for i in range(12)]


@pytest.fixture
def job(tmp_path: Path) -> list[object]:
    return ["--input", write_jsonl(tmp_path / "in.jsonl", ROWS), "--output", tmp_path / "out", "--temperature", 1]


@pytest.fixture
def stop_midway(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Runs a job until it has finished some rows, and no further."""

    def run(model: Path, *options: object) -> None:
        step = Engine.step

        def fail_late(self: Engine) -> list[Result]:
            results = step(self)
            if self.stats.steps == 20:  # of 12 tokens each, at most 4 at once
                raise MemoryError
            return results

        with monkeypatch.context() as patch:
            patch.setattr(Engine, "step", fail_late)
            with pytest.raises(MemoryError):
                call(model, *options, "--max-num-seqs", 4)

    return run


def snapshot(folder: Path) -> dict[str, tuple[int, int]]:
    """(modification time, size) of each file."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path): (path.stat().st_mtime_ns, path.stat().st_size) for path in files}


@pytest.mark.parametrize("name", ["out", "out.jsonl"])
def test_a_finished_job_run_again_does_nothing(
    tmp_path: Path, tiny_model: Path, job: list[object], name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    options = [*job, "--output", tmp_path / name]
    assert call(tiny_model, *options) == 0
    before = snapshot(tmp_path)
    capsys.readouterr()
    assert call(tiny_model, *options) == 0
    assert snapshot(tmp_path) == before
    message = capsys.readouterr().err
    assert f"{tmp_path / name} is finished already" in message
    assert "max_model_len" not in message  # no model was loaded


def change_row(folder: Path) -> list[object]:
    write_jsonl(folder / "in.jsonl", [*ROWS[:3], {**ROWS[3], "prompt": "another"}, *ROWS[4:]])
    return []


def insert_row(folder: Path) -> list[object]:
    write_jsonl(folder / "in.jsonl", [{"id": 99, "prompt": "new", "max_tokens": 12}, *ROWS])
    return []


def change_model(folder: Path) -> list[object]:
    shutil.copytree(save_tiny_model(folder / "other", hidden_size=32), folder / "model-2")
    return ["--model", folder / "model-2"]


CHANGES = [
    pytest.param(change_row, "in.jsonl) changed: content differs", id="row"),
    pytest.param(insert_row, "in.jsonl) changed: 12 rows, now 13", id="inserted"),
    pytest.param(change_model, "the model changed", id="model"),
    pytest.param(lambda _: ["--temperature", 0.5], "--temperature was 1.0, now 0.5", id="temperature"),
    pytest.param(lambda _: ["--max-tokens", 3], "--max-tokens was not given, now 3", id="max_tokens"),
    pytest.param(lambda _: ["--stop", "x"], "--stop was not given, now x", id="stop"),
    pytest.param(lambda _: ["--seed", 5], "--seed was 0, now 5", id="seed"),
    pytest.param(lambda _: ["--kv-cache-dtype", "fp8"], "--kv-cache-dtype was auto, now fp8", id="cache"),
    pytest.param(lambda _: ["--rows-per-part", 5], "--rows-per-part was 50000, now 5", id="layout"),
    pytest.param(lambda _: ["--limit", 5], "--limit was not given, now 5", id="limit"),
    pytest.param(lambda _: ["--output-token-ids"], "--output-token-ids was off, now on", id="columns"),
]


@pytest.mark.parametrize("is_finished", [True, False])
@pytest.mark.parametrize(("change", "words"), CHANGES)
def test_a_changed_job_is_refused_by_what_changed_until_it_may_overwrite(
    tmp_path: Path,
    tiny_model: Path,
    job: list[object],
    stop_midway: Callable[..., None],
    change: Callable[[Path], list[object]],
    words: str,
    is_finished: bool,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if is_finished:
        assert call(tiny_model, *job) == 0
    else:
        stop_midway(tiny_model, *job)
    before = snapshot(tmp_path / "out")
    options = [*job, *change(tmp_path)]
    capsys.readouterr()
    assert call(tiny_model, *options) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    kind = "answers another choice of these rows" if "--limit" in words else "belongs to another job"
    assert last.startswith(f"batchinfer: error: {tmp_path / 'out'} {kind}: ")
    assert words in last
    assert ("To carry that one on, run it as it was." in last) == (not is_finished)
    assert "--overwrite" in last
    assert snapshot(tmp_path / "out") == before

    assert call(tiny_model, *options, "--overwrite") == 0
    fresh = [*options, "--output", tmp_path / "fresh"]
    assert call(tiny_model, *fresh) == 0
    assert without_times(read_rows(tmp_path / "out")) == without_times(read_rows(tmp_path / "fresh"))


def test_what_changes_no_answer_may_change_when_a_job_carries_on(
    tmp_path: Path, tiny_model: Path, job: list[object], stop_midway: Callable[..., None]
) -> None:
    stop_midway(tiny_model, *job)
    harmless = ["--threads", 2, "--kv-cache-memory", "1MiB", "--max-num-seqs", 3, "--block-size", 8]
    harmless += ["--max-num-batched-tokens", 40, "--no-enable-prefix-caching", "--max-errors", "5", "--deadline", "1h"]
    assert call(tiny_model, *job, *harmless) == 0
    stats = json.loads((tmp_path / "out" / "_stats.json").read_text())
    assert stats["rows_resumed"] >= 4
    assert stats["rows"] == 12 == stats["this_run"]["rows"] + stats["rows_resumed"]
    tokens_per_s = stats["this_run"]["completion_tokens"] / stats["busy_seconds"]
    assert stats["output_tokens_per_s"] == pytest.approx(tokens_per_s)
    assert stats["completion_tokens"] == sum(row["completion_tokens"] for row in read_rows(tmp_path / "out"))
    assert call(tiny_model, *job, "--output", tmp_path / "calm") == 0
    assert without_times(read_rows(tmp_path / "out")) == without_times(read_rows(tmp_path / "calm"))


@pytest.mark.parametrize(
    ("first", "then"), [(None, "task"), ("task", "level"), ("task", None)], ids=["added", "changed", "removed"]
)
def test_the_column_that_tells_lengths_apart_may_change_when_a_job_carries_on(
    tmp_path: Path,
    tiny_model: Path,
    job: list[object],
    stop_midway: Callable[..., None],
    first: str | None,
    then: str | None,
) -> None:
    tasks = ("sum", "list", None)
    write_jsonl(tmp_path / "in.jsonl", [{**row, "task": tasks[row["id"] % 3], "level": row["id"] // 4} for row in ROWS])
    before, after = ([] if column is None else ["--length-class-column", column] for column in (first, then))
    stop_midway(tiny_model, *job, *before)
    assert call(tiny_model, *job, *after) == 0
    assert json.loads((tmp_path / "out" / "_stats.json").read_text())["rows_resumed"] >= 4
    assert call(tiny_model, *job, "--output", tmp_path / "calm") == 0
    assert without_times(read_rows(tmp_path / "out")) == without_times(read_rows(tmp_path / "calm"))


def test_max_model_len_stays_what_the_first_cache_made_it(
    tmp_path: Path, tiny_model: Path, job: list[object], stop_midway: Callable[..., None]
) -> None:
    """Rows without max_tokens take the room that is left, so that it decides their answers."""
    write_jsonl(tmp_path / "in.jsonl", [{"id": i, "prompt": "p" * (2 + 12 * (i >= 6))} for i in range(12)])
    options = [*job, "--ignore-eos", "--block-size", 4]
    small = ["--kv-cache-memory", 32 * tiny_bytes_per_token(tiny_model)]  # the model has 256 positions
    stop_midway(tiny_model, *options, *small)
    assert call(tiny_model, *options) == 0
    rows = read_rows(tmp_path / "out")
    assert [row["completion_tokens"] for row in rows] == [32 - 3] * 6 + [32 - 15] * 6  # a BOS goes before the text
    assert json.loads((tmp_path / "out" / "_manifest.json").read_text())["kept"] == {"max_model_len": 32}
    assert call(tiny_model, *options, *small, "--output", tmp_path / "calm") == 0
    assert without_times(rows) == without_times(read_rows(tmp_path / "calm"))


def test_a_cache_that_no_longer_holds_the_jobs_max_model_len_is_refused_in_one_line(
    tmp_path: Path, tiny_model: Path, job: list[object], stop_midway: Callable[..., None], capsys: Any
) -> None:
    stop_midway(tiny_model, *job)
    capsys.readouterr()
    small = ["--kv-cache-memory", 32 * tiny_bytes_per_token(tiny_model)]
    assert call(tiny_model, *job, *small) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "error" in line]
    assert "the job began with --max-model-len 256 and keeps it" in line
    assert "give --kv-cache-memory" in line
    assert line.endswith("or a lower --max-model-len (another one needs another --output, or --overwrite)")
    assert call(tiny_model, *job) == 0
    resumed = capsys.readouterr().err
    assert "--max-model-len: 256, as the job's first run chose; later ones keep it" in resumed
    assert "as asked for" not in resumed


def tiny_bytes_per_token(model: Path) -> int:
    """Keys and values of one token in float32."""
    config = json.loads((model / "config.json").read_text())
    head_dim = config["hidden_size"] // config["num_attention_heads"]
    return 2 * 4 * config["num_hidden_layers"] * config["num_key_value_heads"] * head_dim


def shown(capsys: pytest.CaptureFixture[str], *options: object) -> tuple[list[str], str]:
    """(headings of the rows that `batchinfer show` prints, what it says beside them)."""
    capsys.readouterr()
    assert command_line._run(["show", *map(str, options)]) == 0
    captured = capsys.readouterr()
    return [line.strip("─ ") for line in captured.out.splitlines() if line.startswith("──")], captured.err


@pytest.mark.parametrize("name", ["out", "out.jsonl"])
@pytest.mark.parametrize("rows_per_part", [1, 2, 50_000])
def test_what_an_unfinished_job_has_answered_is_shown(
    tmp_path: Path,
    tiny_model: Path,
    stop_midway: Callable[..., None],
    rows_per_part: int,
    name: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """From parts, which a small rows_per_part makes, and from the journal; nothing of the work folder is touched."""
    rows = [{"id": i, "prompt": f"row {i}", "max_tokens": 12 if i % 3 else 2} for i in range(12)]
    first = write_jsonl(tmp_path / "a.jsonl", rows[:5])
    options = ["--input", first, "--input", write_jsonl(tmp_path / "b.jsonl", [*rows[5:], {"id": 12, "prompt": None}])]
    options += ["--output", tmp_path / name, "--ignore-eos", "--rows-per-part", rows_per_part, "--order", "input"]
    stop_midway(tiny_model, *options, "--n", 2)
    before = snapshot(tmp_path)
    headings, note = shown(capsys, tmp_path / name, "--limit", 99)
    assert snapshot(tmp_path) == before
    answered = [int(heading.split(" · id ")[1]) for heading in headings]
    assert answered == sorted(answered)
    assert 2 <= len(set(answered)) < 13
    places = [f"row {i} of a.jsonl" if i < 5 else f"row {i - 5} of b.jsonl" for i in answered]
    samples = ["" if number % 2 == 0 else ", sample 1" for number in range(len(answered))]
    parts = zip(range(99), places, samples, answered, strict=False)
    assert headings == [f"row {number} · {place}{sample} · id {i}" for number, place, sample, i in parts]
    assert f"{len(set(answered))} of 13 rows are answered so far" in note
    assert "the same `batchinfer run` command, without --overwrite, carries on" in note

    assert call(tiny_model, *options, "--n", 2) == 0
    headings, note = shown(capsys, tmp_path / name, "--limit", 99)
    assert [heading.split(" · id ")[1] for heading in headings] == [str(i) for i in range(12) for _ in range(2)] + [
        "12"
    ]
    assert "not finished" not in note


def test_answers_are_shown_though_the_input_has_gone(
    tmp_path: Path,
    tiny_model: Path,
    job: list[object],
    stop_midway: Callable[..., None],
    capsys: pytest.CaptureFixture[str],
) -> None:
    stop_midway(tiny_model, *job)
    with (tmp_path / "in.jsonl").open("a") as file:
        file.write('{"prompt": "one more"}\n')
    for changed in (True, False):
        if not changed:
            (tmp_path / "in.jsonl").unlink()
        headings, note = shown(capsys, tmp_path / "out")
        assert headings
        assert all("id" not in heading for heading in headings)
        assert "in.jsonl of its input can't be read as it was" in note
        assert "carries on only once the file is as it was" in note
        assert command_line._run(["show", str(tmp_path / "out"), "--columns", "prompt"]) == 2
        assert "--columns prompt: the input file of row 0 can't be read as it was" in capsys.readouterr().err
