"""`batchinfer bench compare` on a tiny model: what it prints and writes, its error lines, and how it ends."""

import json
import os
import signal
import threading
import time
from pathlib import Path

import pytest
from tiny_jobs import save_tiny_model, write_jsonl

from batchinfer.cli import bench_compare
from batchinfer.cli import main as command_line
from batchinfer.comparison import child


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture
def job(tmp_path: Path, model: Path) -> list[str]:
    rows = [{"prompt": f"row {i}", "max_tokens": 5 + i} for i in range(6)]
    path = write_jsonl(tmp_path / "in.jsonl", rows)
    options = ["--model", model, "--dtype", "fp32", "--threads", "1", "--ignore-eos", "--temperature", "0"]
    return ["bench", "compare", "--input", str(path), *map(str, options)]


def call(*arguments: str) -> int:
    return command_line._run(arguments)


def test_variants_are_measured_and_written_in_the_order_asked_for(tmp_path: Path, job: list[str], capsys) -> None:
    path = tmp_path / "figures.json"
    assert call(*job, "--vary", "max-num-seqs=1,3", "--repeat", "1", "--json", str(path)) == 0
    captured = capsys.readouterr()
    said = [line for line in captured.err.splitlines() if "batchinfer: run " in line]
    assert said == ["batchinfer: run 1 of 2: max_num_seqs=1", "batchinfer: run 2 of 2: max_num_seqs=3"]
    header, *rows = captured.out.splitlines()
    assert header.startswith("variant")
    assert [row.split()[0] for row in rows] == ["max_num_seqs=1", "max_num_seqs=3"]
    comparison = json.loads(path.read_text())
    assert comparison["same_work"] is True
    assert [variant["options"] for variant in comparison["variants"]] == [{"max_num_seqs": 1}, {"max_num_seqs": 3}]
    for size, variant in zip((1, 3), comparison["variants"], strict=True):
        assert variant["rows"] == 6
        assert variant["completion_tokens"] == sum(5 + i for i in range(6))
        assert variant["batch_size"]["peak"] == size
        assert variant["runs"] == [variant["runs"][0]]
        assert variant["output_tokens_per_s"] == variant["runs"][0]["output_tokens_per_s"] > 0


def test_a_variant_that_cannot_run_is_one_line(job: list[str], capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    code = "import sys; print('batchinfer: error: no room', file=sys.stderr); sys.exit(2)"
    monkeypatch.setattr(child, "_START", code)
    assert call(*job, "--vary", "max_num_seqs=1,2") == 2
    captured = capsys.readouterr()
    assert captured.err.splitlines() == [
        "batchinfer: run 1 of 4: max_num_seqs=1",
        "batchinfer: error: variant max_num_seqs=1: no room",
    ]
    assert captured.out == ""


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ([], "give --vary OPTION=V1,V2 (repeatable) or --confirm"),
        (["--vary", "kv_cache_dtyp=fp8,int8"], "did you mean 'kv_cache_dtype'?"),
        (["--vary", "dtype=bf16,fp8"], "'fp8' is not one of auto, bf16, fp16, fp32"),
        (["--vary", "top_p=0.5,7"], "variant top_p=7: top_p = 7.0: must be above 0 and at most 1"),
        (["--vary", "max_num_seqs=1,2", "--repeat", "0"], "--repeat"),
        (["--vary", "temperature=0,1"], "--temperature is given and varies, too"),
    ],
)
def test_usage_mistakes_are_one_line_before_anything_runs(job: list[str], capsys, options, words) -> None:
    assert call(*job, *options) == 2
    captured = capsys.readouterr()
    assert words in captured.err
    assert captured.err.count("\n") == 1
    assert captured.out == ""


def test_the_input_may_vary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    asked = []

    def compared(options, variants, rounds, report):
        asked.extend(variant.values for variant in variants)
        return {"variants": [], "rounds": rounds}

    monkeypatch.setattr(bench_compare, "compared", compared)
    monkeypatch.setattr(bench_compare, "comparison_table", lambda figures: f"{figures['rounds']} rounds")
    assert call("bench", "compare", "--vary", "input=a.jsonl,b.jsonl") == 0
    assert asked == [{"input": ("a.jsonl",)}, {"input": ("b.jsonl",)}]
    assert capsys.readouterr().out == "2 rounds\n"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_comparison_and_its_run(
    tmp_path: Path, job: list[str], capsys, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    pid_file = tmp_path / "pid"
    code = f"import os, time; open({str(pid_file)!r}, 'w').write(str(os.getpid()) + ' '); time.sleep(60)"
    monkeypatch.setattr(child, "_START", code)

    def interrupt() -> None:
        while not (pid_file.exists() and pid_file.read_text().endswith(" ")):
            time.sleep(0.01)
        os.kill(os.getpid(), number)

    thread = threading.Thread(target=interrupt)
    thread.start()
    assert call(*job, "--vary", "max_num_seqs=1,2") == 75
    thread.join()
    assert "interrupted" in capsys.readouterr().err
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid_file.read_text()), 0)
