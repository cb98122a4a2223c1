"""`batchinfer bench kernels`: what it prints, and how it ends."""

import pytest
import torch

pytest.importorskip("triton")

from batchinfer.kernels.common.triton_inspect import Anatomy

from batchinfer.cli.main import main
from batchinfer.executors import kernel_gates
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
    def verdicts(target, model):
        yield Verdict(target.name, model.name, "case", Anatomy("_kernel", 40, 0, 1024, 0, {128: 4}), faults)

    monkeypatch.setattr(kernel_gates, "verdicts", verdicts)
    assert run("--compile-only", "--target", "sm_80,gfx942", "--model", "Qwen3-8B") == code
    out, err = capsys.readouterr()
    assert [line.split()[0] for line in out.splitlines()] == ["target", "sm_80", "gfx942"]
    assert ("2 kernels fail" in err) == bool(faults)
