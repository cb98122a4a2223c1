"""`batchinfer bench kernels`: what it prints, and how it ends."""

import errno
import json
import os

import pytest
import torch

pytest.importorskip("triton")

from batchinfer.kernels.common.triton_inspect import Anatomy

from batchinfer.cli.main import main
from batchinfer.executors import gpu_check, kernel_gates
from batchinfer.executors.kernel_gates import Verdict


def run(*arguments):
    with pytest.raises(SystemExit) as ended:
        main(["bench", "kernels", *arguments])
    return ended.value.code


@pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA device is here")
def test_without_a_device_it_says_so_in_one_line(capsys):
    assert run("--device", "cuda") == 2
    message = capsys.readouterr().err
    assert message.count("\n") == 1
    assert "no CUDA device" in message


@pytest.mark.parametrize(
    ("arguments", "message"), [(("--target", "sm_12"), "--target sm_12"), (("--model", "gpt-2"), "--model gpt-2")]
)
def test_names_that_are_not_in_the_tables(capsys, arguments, message):
    assert run("--compile-only", *arguments) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(("faults", "code"), [((), 0), (("2 spills",), 1)])
def test_the_table_and_its_exit_code(capsys, monkeypatch, faults, code):
    def verdicts(targets, models):
        for target in targets:
            anatomy = Anatomy("_kernel", 40, 0, 1024, {"H": 0}, {128: 4}, 16)
            yield from (Verdict(target.name, model.name, "case", anatomy, faults) for model in models)

    monkeypatch.setattr(kernel_gates, "all_verdicts", verdicts)
    assert run("--compile-only", "--target", "sm_80,gfx942", "--model", "Qwen3-8B") == code
    out, err = capsys.readouterr()
    assert [line.split()[0] for line in out.splitlines()] == ["target", "sm_80", "gfx942"]
    assert ("2 kernels fail" in err) == bool(faults)


def test_a_file_that_fails_at_the_end_loses_no_summary(capsys, monkeypatch, tmp_path):
    def full(descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(gpu_check.GpuCheck, "run", lambda check: None)
    monkeypatch.setattr(gpu_check.GpuCheck, "summary", lambda check: ["the", "summary"])
    monkeypatch.setattr(os, "fsync", full)
    assert run("--device", "cpu", "--part", "model", "--json", str(tmp_path / "f.json")) == 1
    out, err = capsys.readouterr()
    assert out == "the\nsummary\n"
    assert err == f"batchinfer: error: {tmp_path / 'f.json'}: No space left on device\n"


PART = """
import json, sys
task = json.loads(sys.argv[1])
def tell(event, **values):
    print(json.dumps(dict(event=event, **values)), flush=True)
if task["part"] == "kernels":
    tell("cases", names=["a", "b"])
    for number in range(task["first"], 2):
        tell("begin", number=number)
        tell("figure", line=f"line {number}", figures=dict(is_right=IS_RIGHT, reached=True))
else:
    tell("figure", line=str(task["num_seqs"]), figures=dict(reached=False), workload=task["workloads"][0])
"""


@pytest.mark.parametrize(("is_right", "code"), [("True", 0), ("number == 0", 1)])
def test_a_check_of_a_device(capsys, monkeypatch, tmp_path, is_right, code):
    monkeypatch.setattr("batchinfer.executors.kernel_device.ready", lambda device: True)
    monkeypatch.setattr("batchinfer.executors.part_process.START", PART.replace("IS_RIGHT", is_right))
    file = tmp_path / "check.json"
    assert run("--workload", "9/5", "--num-seqs", "7", "--budget", "30s", "--json", str(file)) == code
    out, err = capsys.readouterr()
    assert out.splitlines()[:3] == ["line 0", "line 1", "7"]
    assert out.splitlines()[3].startswith(f"2 kernels checked, {code} differ from their references; 2 of 3 aims")
    assert ("1 kernels differ" in err) == bool(code)
    written = json.loads(file.read_text())
    assert len(written["kernels"]) == 2
    assert (written["budget_s"], written["left_out"]) == (30.0, [])


def test_a_cpu_has_the_models_part_only(capsys):
    assert run("--device", "cpu") == 2
    assert "give --part model" in capsys.readouterr().err
