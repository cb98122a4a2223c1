"""Files that commands write at their end: what stood there stays until it is replaced whole, and faults come early."""

import errno
import json
import os
import stat
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tiny_jobs import write_jsonl

from batchinfer.cli import main as command_line
from batchinfer.cli.results import ResultFile, show

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


def fail(number: int) -> Callable[..., None]:
    def refuse(*arguments: object) -> None:
        raise OSError(number, os.strerror(number))

    return refuse


@pytest.mark.parametrize("number", [errno.EPERM, errno.EBUSY])
def test_a_file_that_may_be_written_and_not_be_replaced_is_written_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """Of another user in a sticky folder, and where a file is mounted."""
    (file := tmp_path / "figures.json").write_text(OLD * 100)
    place = file.stat().st_ino
    result = ResultFile(str(file))
    monkeypatch.setattr(os, "replace", fail(number))
    result.write("new")
    assert file.read_text() == "new"
    assert file.stat().st_ino == place
    assert os.listdir(tmp_path) == ["figures.json"]


def test_a_fault_of_the_disk_in_replacing_leaves_the_old_content(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (file := tmp_path / "figures.json").write_text(OLD)
    result = ResultFile(str(file))
    monkeypatch.setattr(os, "replace", fail(errno.EIO))
    with pytest.raises(OSError, match="Input/output error"):
        result.write("new")
    assert file.read_text() == OLD
    assert os.listdir(tmp_path) == ["figures.json"]


def test_a_folder_that_takes_no_file_has_those_written_over_that_may_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (file := tmp_path / "figures.json").write_text(OLD * 100)
    open_file = os.open

    def refuse_new(path: str, flags: int, *mode: int) -> int:
        if flags & os.O_CREAT:  # in a sticky folder the kernel refuses it even for what stands there
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
        return open_file(path, flags, *mode)

    monkeypatch.setattr(os, "open", refuse_new)
    ResultFile(str(file)).write("new")
    assert file.read_text() == "new"
    with pytest.raises(PermissionError):
        ResultFile(str(tmp_path / "another"))


def test_files_that_others_left_do_not_stand_in_the_way(tmp_path: Path) -> None:
    (stale := tmp_path / f".batchinfer-{os.getpid()}.tmp").write_text("stale")
    first, second = (ResultFile(str(tmp_path / name)) for name in "ab")
    first.write("one")
    second.write("two")
    assert [(tmp_path / name).read_text() for name in "ab"] == ["one", "two"]
    assert stale.read_text() == "stale"
    assert len(os.listdir(tmp_path)) == 3


def test_a_private_file_is_never_readable_by_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (file := tmp_path / "figures.json").write_text(OLD)
    file.chmod(0o600)
    result, modes = ResultFile(str(file)), []
    open_file, sync = os.open, os.fsync

    def spy_open(*arguments: Any) -> int:
        descriptor = open_file(*arguments)
        modes.append(stat.S_IMODE(os.fstat(descriptor).st_mode))
        return descriptor

    def spy_sync(descriptor: int) -> None:
        modes.append(stat.S_IMODE(os.fstat(descriptor).st_mode))
        sync(descriptor)

    monkeypatch.setattr(os, "open", spy_open)
    monkeypatch.setattr(os, "fsync", spy_sync)
    result.write("secret")
    assert modes == [0o600, 0o600]
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


@pytest.mark.parametrize(
    ("command", "work", "table"),
    [
        (("plan", "--input", "{rows}", "--model", "m"), "planning.plan.plan_job", "planning.table.plan_table"),
        (("evaluate", "--text", "t"), "evaluation.evaluate.evaluate", "evaluation.table.evaluation_table"),
        (("bench", "throughput", "--input", "{rows}"), "pipeline.bench_throughput", "summary.summary_table"),
        (("bench", "step"), "executors.step_profile.profile_steps", "executors.step_profile.step_table"),
        (
            ("bench", "compare", "--input", "{rows}", "--vary", "dtype=bf16,fp32"),
            "cli.bench_compare.compared",
            "cli.bench_compare.comparison_table",
        ),
    ],
    ids=["plan", "evaluate", "throughput", "step", "compare"],
)
def test_a_file_that_fails_at_the_end_loses_no_table(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    command: tuple[str, ...],
    work: str,
    table: str,
) -> None:
    rows = write_jsonl(tmp_path / "rows.jsonl", [{"prompt": "a"}])
    monkeypatch.setattr(f"batchinfer.{work}", lambda *given: {})
    monkeypatch.setattr(f"batchinfer.{table}", lambda figures: "the table")
    monkeypatch.setattr(os, "fsync", fail(errno.ENOSPC))
    assert call(*(word.format(rows=rows) for word in command), "--json", tmp_path / "f.json") != 0
    said = capsys.readouterr()
    assert said.out == "the table\n"
    assert said.err == f"batchinfer: error: {tmp_path / 'f.json'}: No space left on device\n"
    assert not (tmp_path / "f.json").exists()


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


WRITER = """
import sys
from batchinfer.cli.results import ResultFile
print("table")
file = ResultFile(sys.argv[1])
file.write("figures\\n")
print("end")
"""


@pytest.mark.parametrize("path", ["/dev/stdout", "/dev/fd/1", "/proc/self/fd/1", "link", "-"])
def test_stdout_by_its_path_is_continued(tmp_path: Path, path: str) -> None:
    """A pipe, and regular files as `>> log` and `> file` give them."""
    (tmp_path / "link").symlink_to("/dev/stdout")
    command = [sys.executable, "-c", WRITER, path]
    told = "table\nfigures\nend\n"
    assert subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path).stdout == told
    for mode, before in (("a", "a log\n"), ("w", "")):
        (file := tmp_path / mode).write_text("a log\n")
        with open(file, mode) as stdout:
            subprocess.run(command, stdout=stdout, check=True, cwd=tmp_path)
        assert file.read_text() == before + told
    assert sorted(os.listdir(tmp_path)) == ["a", "link", "w"]


def test_a_descriptor_that_takes_no_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "f").write_text(OLD)
    with open(tmp_path / "f") as read_only, pytest.raises(OSError, match="Bad file descriptor"):
        ResultFile(f"/dev/fd/{read_only.fileno()}")
    with pytest.raises(OSError, match="Bad file descriptor"):
        ResultFile("/dev/fd/987654")


@pytest.mark.parametrize(
    ("place", "reason"),
    [
        (".", "it is a directory; give a file"),
        ("no/f.json", "there is no such folder; make it or choose another place"),
        ("file/f.json", "its folder is none; choose another place"),
        ("f" * 256, "its name is too long; choose a shorter one"),
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


@pytest.mark.parametrize(
    ("path", "is_apart"), [("-", True), ("/dev/stdout", True), ("file.json", False), (None, False)]
)
def test_a_table_leaves_stdout_to_the_figures_that_are_to_stand_there(tmp_path, monkeypatch, capsys, path, is_apart):
    monkeypatch.chdir(tmp_path)
    show("the table", None, None if path is None else ResultFile(path))
    told = capsys.readouterr()
    assert (told.out, told.err) == (("", "the table\n") if is_apart else ("the table\n", ""))
