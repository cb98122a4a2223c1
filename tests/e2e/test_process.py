"""The command line as a process: it leaves none behind, opens no socket, and its faults are one line."""

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
import torch
from tiny_jobs import call, read_rows, start, write_jsonl, write_parquet

from batchinfer.models.decoder import Decoder


def job(folder: Path, max_tokens: int = 4, rows: int = 20) -> list[object]:
    rows_of_job = [{"id": i, "prompt": f"row {i}", "max_tokens": max_tokens, "ignore_eos": True} for i in range(rows)]
    return ["--input", write_jsonl(folder / "in.jsonl", rows_of_job), "--output", folder / "out"]


REFUSE_CONNECTIONS = """
import sys
def refuse(event, arguments):
    if event in ("socket.connect", "socket.getaddrinfo", "socket.gethostbyname", "socket.sendto"):
        raise SystemExit(f"{event} {arguments}")
sys.addaudithook(refuse)
import socket
"""


def test_a_local_model_opens_no_connection(tmp_path: Path, tiny_model: Path) -> None:
    second = write_parquet(tmp_path / "more.parquet", [{"id": 20, "prompt": "more", "max_tokens": 2}])
    process = start(tiny_model, *job(tmp_path), "--input", second, prelude=REFUSE_CONNECTIONS)
    _, message = process.communicate(timeout=60)
    assert process.returncode == 0, message
    assert len(read_rows(tmp_path / "out")) == 21


def test_the_hook_of_the_test_above_sees_connections(tmp_path: Path) -> None:
    process = start(tmp_path, prelude=REFUSE_CONNECTIONS + "socket.create_connection(('127.0.0.1', 9), 1)")
    _, message = process.communicate(timeout=60)
    assert "socket." in message
    assert process.returncode == 1


def processes_of_group(group: int) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        try:
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
        except (OSError, IndexError):
            continue
        if int(fields[2]) == group and fields[0] != "Z":
            found.append(int(entry.name))
    return found


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="reads /proc")
def test_a_killed_job_leaves_no_process_and_no_lock(tmp_path: Path, tiny_model: Path) -> None:
    options = job(tmp_path, max_tokens=200, rows=60)
    process = start(tiny_model, *options, "--max-num-seqs", 4, start_new_session=True, stderr=subprocess.DEVNULL)
    while not (tmp_path / "out" / "_work" / "job.json").exists():
        assert process.poll() is None
        time.sleep(0.02)
    group = os.getpgid(process.pid)
    assert processes_of_group(group)
    process.send_signal(signal.SIGKILL)
    process.wait(timeout=30)
    deadline = time.monotonic() + 5
    while processes_of_group(group):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert call(tiny_model, *options, "--max-num-seqs", 64) == 0


def test_an_output_that_a_process_writes_is_refused_by_its_holder(tmp_path: Path, tiny_model: Path, capsys) -> None:
    options = job(tmp_path, max_tokens=200, rows=60)
    process = start(tiny_model, *options, "--max-num-seqs", 1, stderr=subprocess.DEVNULL)
    try:
        while not (tmp_path / "out" / "_work" / "job.json").exists():
            assert process.poll() is None
            time.sleep(0.02)
        assert call(tiny_model, *options) == 2
        assert str(process.pid) in capsys.readouterr().err.splitlines()[-1]
    finally:
        process.kill()
        process.communicate()


def test_a_device_without_memory_ends_the_job_in_one_line_and_finished_rows_are_safe(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    forward, steps = Decoder.forward, []

    def failing_forward(self: Decoder, *arguments: object) -> torch.Tensor:
        steps.append(1)
        if len(steps) > 10:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return forward(self, *arguments)

    options = [*job(tmp_path), "--max-num-seqs", 5]
    with monkeypatch.context() as patch:
        patch.setattr(Decoder, "forward", failing_forward)
        assert call(tiny_model, *options) == 1
    message = capsys.readouterr().err.splitlines()[-1]
    assert message.startswith("batchinfer: error: ")
    assert "memory" in message
    assert call(tiny_model, *options) == 0
    assert "carrying on: 10 of 20 rows are answered already" in capsys.readouterr().err  # 5 rows take 4 steps


def test_the_alternatives_of_each_token_are_in_the_output(tmp_path: Path, tiny_model: Path) -> None:
    options = [*job(tmp_path, max_tokens=30), "--logprobs", 20, "--prompt-logprobs"]
    assert call(tiny_model, *options) == 0
    for row in read_rows(tmp_path / "out"):
        assert len(row["logprobs"]) == 30
        assert all(len(entry["top"]) == 20 for entry in row["logprobs"])
        best = [entry["top"][0]["logprob"] for entry in row["logprobs"]]
        assert all(entry["logprob"] <= top for entry, top in zip(row["logprobs"], best, strict=True))


@pytest.mark.parametrize(
    ("options", "code", "words"),
    [
        (["--input", "absent.jsonl"], 2, "absent.jsonl"),
        (["--input", "in.jsonl", "--prompt-column", "x"], 2, "no such column"),
        (["--input", "in.jsonl", "--max-model-len", 100_000], 2, "the model has positions for 256"),
        (["--input", "in.jsonl", "--kv-cache-memory", "100"], 2, "--kv-cache-memory"),
        (["--input", "in.jsonl", "--device", "cuda"], 2, "torch sees no CUDA device"),
        (["--input", "in.jsonl", "--output", "x.csv"], 2, "a single file is .parquet or .jsonl"),
        (["--input", "clash.jsonl"], 2, "--output-prefix"),
        (["--input", "in.jsonl", "--model", "absent/model/here"], 2, "no such file or directory"),
    ],
)
def test_faults_of_the_configuration_are_one_line(
    tmp_path: Path,
    tiny_model: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    options: list[object],
    code: int,
    words: str,
) -> None:
    if "cuda" in options and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    monkeypatch.chdir(tmp_path)
    write_jsonl(tmp_path / "in.jsonl", [{"prompt": "a"}])
    write_jsonl(tmp_path / "clash.jsonl", [{"prompt": "a", "completion": "b"}])
    assert call(tiny_model, *options) == code
    errors = [line for line in capsys.readouterr().err.splitlines() if "error" in line]
    assert len(errors) == 1
    assert words in errors[0]
    assert not list(tmp_path.glob("*.completions/part*"))
