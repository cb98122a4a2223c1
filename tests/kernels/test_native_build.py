"""Building the native code: once, safely beside another process, with a clear way out where it cannot be."""

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest
from batchinfer.kernels.common import native, targets

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


def test_what_is_built_ahead_is_loaded_without_a_compiler(tmp_path, monkeypatch):
    """Only a folder of a kind that this CPU is, and of these sources, counts; another is said to be of no use."""
    told = []
    ahead = native.build_ahead(told.append, tmp_path / "ahead")
    assert sorted(path.name for path in ahead.iterdir()) == sorted(t.name for t in targets.targets_of_architecture())
    assert all(names(directory) == ["rotary"] for directory in ahead.iterdir())
    assert len(told) == len(targets.targets_of_architecture())
    code = """if True:
        from batchinfer.kernels.common import native
        native.OPERATIONS = ("rotary",)
        libraries = native.prepare(print)
        print(libraries and libraries["rotary"].parent.name)"""
    environment = {"PATH": "/nonexistent", "CXX": "", "BATCHINFER_CACHE": str(tmp_path / "cache")}
    out, error = run_python(code, **environment, BATCHINFER_KERNELS=str(ahead)).communicate()
    assert out.splitlines() == [targets.fitting_targets()[0].name], error
    out, _ = run_python(code, **environment, BATCHINFER_KERNELS=str(tmp_path)).communicate()
    assert "has no CPU kernels of this version" in out
    assert "plain torch" in out
    assert out.splitlines()[-1] == "None"


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the flags are those of x86-64")
@pytest.mark.parametrize(
    ("flags", "best"),
    [
        ("fpu sse2", "x86-64"),
        ("avx avx2 bmi1 bmi2 f16c fma abm movbe", "x86-64-v3"),
        ("avx avx2 bmi1 bmi2 f16c fma abm movbe avx512f avx512bw avx512cd avx512dq avx512vl avx512_bf16", "x86-64-v4"),
    ],
)
def test_the_fastest_kind_that_a_cpu_is(monkeypatch, flags, best):
    monkeypatch.setattr(targets, "cpu_lines", lambda wanted: f"flags\t\t: {flags}")
    assert targets.fitting_targets()[0].name == best
    assert targets.fitting_targets()[-1].name == "x86-64"
