"""Building the native code: once, safely beside another process, with a clear way out where it cannot be."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from batchinfer.kernels.common import native

USUAL_CACHE = os.environ.get("BATCHINFER_CACHE", "")


@pytest.fixture(autouse=True)
def _one_small_operation(monkeypatch, tmp_path):
    monkeypatch.setattr(native, "OPERATIONS", ("rotary",))
    monkeypatch.setenv("BATCHINFER_CACHE", str(tmp_path))


def names(directory):
    """The operations whose libraries lie there."""
    return sorted(path.name.split("-")[0] for path in directory.iterdir())


def run_python(code, **environment):
    return subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **environment},
    )


def test_builds_once_and_says_so(tmp_path):
    told = []
    directory = native.build(told.append)
    assert names(directory) == ["rotary"]
    assert directory.is_relative_to(tmp_path)
    assert len(told) == 1
    assert native.build(told.append) == directory
    assert len(told) == 1


def test_two_processes_at_once(tmp_path):
    code = """if True:
        import ctypes
        from batchinfer.kernels.common import native
        native.OPERATIONS = ("rotary",)
        print(ctypes.CDLL(str(*native.build(print).glob("*.so"))).rotary)"""
    processes = [run_python(code) for _ in range(2)]
    for process in processes:
        _, error = process.communicate()
        assert process.returncode == 0, error
    assert [name for directory in (tmp_path / "native").iterdir() for name in names(directory)] == ["rotary"]


def test_only_what_an_edited_source_touches_is_built_anew(monkeypatch, tmp_path):
    sources = tmp_path / "sources"
    for name, text in {
        "common/shared.h": "inline int one() { return 1; }",
        "norm/cpu.cpp": '#include "../common/shared.h"\nextern "C" int norm() { return one(); }',
        "gate/cpu.cpp": 'extern "C" int gate() { return 2; }',
    }.items():
        (sources / name).parent.mkdir(parents=True, exist_ok=True)
        (sources / name).write_text(text + "\n")
    monkeypatch.setattr(native, "KERNELS", sources)
    monkeypatch.setattr(native, "OPERATIONS", ("norm", "gate"))
    assert names(native.build(print)) == ["gate", "norm"]
    (sources / "common" / "shared.h").write_text("inline int one() { return 1 + 0; }\n")
    assert names(native.build(print)) == ["gate", "norm", "norm"]


def test_no_compiler(monkeypatch):
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(native.NativeBuildError, match="no C\\+\\+ compiler"):
        native.build(print)


@pytest.mark.parametrize("compiler", ["/nonexistent/c++", "false"])
def test_compiler_that_does_not_work(monkeypatch, compiler):
    monkeypatch.setenv("CXX", compiler)
    with pytest.raises(native.NativeBuildError):
        native.build(print)


def test_broken_source_is_reported_by_its_error(monkeypatch, tmp_path):
    (tmp_path / "sources" / "rotary").mkdir(parents=True)
    (tmp_path / "sources" / "rotary" / "cpu.cpp").write_text("int x = ;\n")
    monkeypatch.setattr(native, "KERNELS", tmp_path / "sources")
    with pytest.raises(native.NativeBuildError, match="error: expected"):
        native.build(print)
    assert not list(tmp_path.glob("native/*/*"))


def test_directory_that_cannot_be_written(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("BATCHINFER_CACHE", str(tmp_path / "file"))
    with pytest.raises(native.NativeBuildError, match="set BATCHINFER_CACHE"):
        native.build(print)


def test_without_a_compiler_plain_torch_runs_and_one_line_says_so(tmp_path):
    code = """if True:
        import torch
        from batchinfer.kernels.gated_activation import gated_activation
        from batchinfer.kernels.rms_norm import rms_norm
        for _ in range(2):
            print(rms_norm(torch.tensor([[3.0, 4.0]]), torch.ones(2), 0.0).tolist())
            gated_activation(torch.ones(1, 2), "silu")"""
    out, error = run_python(code, PATH="/nonexistent", CXX="", BATCHINFER_CACHE=str(tmp_path)).communicate()
    expected = 3 / 12.5**0.5
    assert [round(eval(line)[0][0], 5) for line in out.splitlines()] == [round(expected, 5)] * 2
    assert len(error.splitlines()) == 1
    assert "plain torch" in error


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="threads are counted through /proc")
def test_shares_the_threads_of_torch():
    code = """if True:
        import os, torch
        from batchinfer.kernels.common import native
        from batchinfer.kernels.rms_norm import rms_norm
        torch.set_num_threads(3)
        x, weight = torch.randn(4000, 512), torch.ones(512)
        x.exp()
        before = len(os.listdir("/proc/self/task"))
        rms_norm(x, weight, 1e-5)
        assert native.can_run("rms_norm", x)
        print(before, len(os.listdir("/proc/self/task")))"""
    out, error = run_python(code, BATCHINFER_CACHE=USUAL_CACHE).communicate()
    assert out, error
    before, after = map(int, out.split())
    assert before == after >= 3
