"""Files that commands write at their end: what stood there stays until it is replaced whole, and faults come early."""

import json
import os
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from tiny_jobs import write_jsonl

from batchinfer.cli import main as command_line
from batchinfer.cli.results import ResultFile

OLD = '{"of": "an earlier run"}\n'


def call(*arguments: object) -> int:
    return command_line._run([str(argument) for argument in arguments])


@pytest.mark.parametrize(
    "command",
    [
        ("plan", "--input", "{rows}", "--model", "{nowhere}"),
        ("evaluate", "--text", "{nowhere}"),
        ("bench", "throughput", "--input", "{rows}", "--model", "{nowhere}"),
        ("bench", "compare", "--input", "{rows}", "--model", "{nowhere}", "--vary", "dtype=bf16,fp32"),
        ("bench", "compare", "--input", "{rows}", "--confirm"),
        ("bench", "step", "--num-seqs", "0"),
        ("bench", "model", "--workload", "1"),
        ("bench", "kernels", "--device", "cpu"),
    ],
    ids=lambda command: " ".join(command[:2]),
)
def test_a_command_that_fails_leaves_the_file_as_it_was(tmp_path: Path, command: tuple[str, ...]) -> None:
    places = {"rows": write_jsonl(tmp_path / "rows.jsonl", [{"prompt": "a"}]), "nowhere": tmp_path / "nowhere"}
    (folder := tmp_path / "results").mkdir()
    (file := folder / "figures.json").write_text(OLD)
    assert call(*(word.format(**places) for word in command), "--json", file) in (1, 2)
    assert file.read_text() == OLD
    assert os.listdir(folder) == ["figures.json"]


def test_new_content_replaces_the_old_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "figures.json"
    file.write_text(OLD * 100)
    file.chmod(0o640)
    replace, seen = os.replace, []

    def spy(source: str, target: str) -> None:
        seen.append((file.read_text(), json.loads(Path(source).read_text())))
        replace(source, target)

    monkeypatch.setattr(os, "replace", spy)
    ResultFile(str(file)).write_json({"a": [1, "é"]})
    assert seen == [(OLD * 100, {"a": [1, "é"]})]
    assert json.loads(file.read_text()) == {"a": [1, "é"]}
    assert stat.S_IMODE(file.stat().st_mode) == 0o640
    assert os.listdir(tmp_path) == ["figures.json"]


def test_a_full_disk_leaves_the_old_content_and_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "figures.json"
    file.write_text(OLD)
    result = ResultFile(str(file))

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left on device") as raised:
        result.write("new")
    assert raised.value.filename == str(file)
    assert file.read_text() == OLD
    assert os.listdir(tmp_path) == ["figures.json"]


def test_a_new_file_has_the_modes_of_any_other(tmp_path: Path) -> None:
    ResultFile(str(tmp_path / "a")).write("x")
    (tmp_path / "b").write_text("x")
    assert (tmp_path / "a").stat().st_mode == (tmp_path / "b").stat().st_mode


def test_a_link_stays_one(tmp_path: Path) -> None:
    (tmp_path / "real").write_text(OLD)
    (tmp_path / "link").symlink_to(tmp_path / "real")
    ResultFile(str(tmp_path / "link")).write("new")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real").read_text() == "new"


def test_pipes_and_stdout_are_written_to_as_they_are(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    os.mkfifo(pipe := tmp_path / "pipe")
    received: list[str] = []
    reader = threading.Thread(target=lambda: received.append(pipe.read_text()))
    reader.start()
    ResultFile(str(pipe)).write("through")
    reader.join()
    assert received == ["through"]
    assert stat.S_ISFIFO(pipe.stat().st_mode)
    ResultFile("-").write("to stdout")
    assert capsys.readouterr().out == "to stdout"
    assert not sys.stdout.closed


def test_stdout_by_its_path_is_written_through() -> None:
    code = "from batchinfer.cli.results import ResultFile\nResultFile('/dev/stdout').write('through')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "through"


@pytest.mark.parametrize(
    ("place", "reason"),
    [
        (".", "it is a directory; give a file"),
        ("no/f.json", "there is no such folder; make it or choose another place"),
        ("file/f.json", "its folder is none; choose another place"),
    ],
)
def test_places_that_cannot_be_written_are_refused_before_anything_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], place: str, reason: str
) -> None:
    (tmp_path / "file").write_text("x")
    assert call("bench", "throughput", "--input", "absent.jsonl", "--json", tmp_path / place) == 2
    said = capsys.readouterr().err
    assert said.startswith(
        f"batchinfer: error: Invalid value for '--json': cannot write {tmp_path / place}: {reason} ("
    )
    assert said.count("\n") == 1


def test_a_file_that_may_not_be_written_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (file := tmp_path / "f.json").write_text(OLD)
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # as for a user other than root
    with pytest.raises(PermissionError):
        ResultFile(str(file))
