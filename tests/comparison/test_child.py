"""A run in a process of its own: flags that mean the same options, its error lines, its memory, and its end."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from batchinfer.cli.options import effective_options
from batchinfer.cli.run import run
from batchinfer.comparison import child
from batchinfer.comparison.child import flags, measure
from batchinfer.errors import BatchInferError, UsageError
from batchinfer.options import EffectiveOptions
from batchinfer.progress import Progress, ProgressFigures

VALUES = {
    "input": ("a b.jsonl", "-x.parquet"),
    "enable_prefix_caching": False,
    "ignore_eos": True,
    "stop": ("\n", "--", " "),
    "stop_token_ids": (7, 8),
    "kv_cache_memory": 24 * 2**20,
    "deadline": 5400.5,
    "temperature": 0.1,
    "logit_bias": '{"42": -1.5}',
    "template": "{{ prompt }}\nAnswer = ",
    "kv_cache_dtype": "fp8",
    "max_num_seqs": 8,
}
OPTIONS = EffectiveOptions.resolve(VALUES)


def test_flags_give_the_same_options():
    with run.make_context("run", flags(OPTIONS)) as context:
        read = effective_options(context)
    assert {name: option.value for name, option in read.items()} == {
        name: option.value for name, option in OPTIONS.items()
    }
    assert {name for name, option in read.items() if option.source == "flag"} == set(VALUES)


def python(monkeypatch: pytest.MonkeyPatch, code: str) -> None:
    monkeypatch.setattr(child, "_START", code)


@pytest.mark.parametrize(
    ("code", "kind", "message"),
    [
        ("import sys; print('x\\nbatchinfer: error: no room', file=sys.stderr); sys.exit(2)", UsageError, "no room"),
        ("import sys; print('batchinfer: error: torn', file=sys.stderr); sys.exit(1)", BatchInferError, "torn"),
        ("import sys; sys.exit(9)", BatchInferError, "the run ended with exit code 9"),
        ("1 / 0", BatchInferError, "ZeroDivisionError: division by zero"),
        (
            "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
            BatchInferError,
            "the run was ended by SIGKILL; the system may be short of memory",
        ),
    ],
)
def test_a_run_that_fails_is_one_line(monkeypatch, code, kind, message):
    python(monkeypatch, code)
    with pytest.raises(kind) as caught:
        measure(OPTIONS, lambda line: None)
    assert type(caught.value) is kind
    assert str(caught.value) == message


def test_an_interrupted_run_interrupts(monkeypatch):
    python(monkeypatch, "import sys; sys.exit(75)")
    with pytest.raises(KeyboardInterrupt):
        measure(OPTIONS, lambda line: None)


def test_progress_and_warnings_are_passed_on_and_the_rest_is_not(monkeypatch, capfd):
    progress = Progress(20, stream=sys.stderr)
    progress.close(
        ProgressFigures(
            rows_done=20, rows_done_here=20, errors=0, tokens_of_rows_done=9, tokens_computed=9, output_tokens=5
        )
    )
    shown = capfd.readouterr().err
    said = f"batchinfer: options: a=1\n{shown}\nUserWarning: old\n"
    python(
        monkeypatch,
        f"import sys, json; sys.stderr.write({said!r}); "
        "open(sys.argv[3].removeprefix('--json='), 'w').write(json.dumps({'rows': 20}))",
    )
    lines: list[str] = []
    assert measure(OPTIONS, lines.append) == {"rows": 20}
    assert lines == [shown.rstrip().removeprefix("batchinfer: "), "UserWarning: old"]
    assert "20/20 rows" in lines[0]


def test_an_interrupt_ends_the_run_too(monkeypatch, tmp_path: Path):
    """A run that ignores SIGTERM, as one in a long kernel does for a while."""
    monkeypatch.setattr(child, "_END_SECONDS", 0.2)
    pid_file = tmp_path / "pid"
    python(
        monkeypatch,
        "import os, signal, sys, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
        f"open({str(pid_file)!r}, 'w').write(str(os.getpid()) + ' '); time.sleep(60)",
    )

    def interrupt() -> None:
        while not (pid_file.exists() and pid_file.read_text().endswith(" ")):
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        measure(OPTIONS, lambda line: None)
    thread.join()
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid_file.read_text()), 0)


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the system has no peak of a program alone")
def test_peak_memory_is_the_runs_own_whatever_its_parent_holds():
    reported = "from batchinfer.process import peak_memory_bytes; print(peak_memory_bytes())"
    parent = (
        "import subprocess, sys; held = b'x' * (400 << 20); "
        f"print(subprocess.run([sys.executable, '-c', {reported!r}], capture_output=True, text=True).stdout)"
    )
    done = subprocess.run([sys.executable, "-c", parent], capture_output=True, text=True, check=True)
    assert 2 << 20 < int(done.stdout) < 100 << 20


def test_warnings_of_a_run_are_passed_on(monkeypatch: pytest.MonkeyPatch):
    python(
        monkeypatch,
        "import sys; print('batchinfer: KV cache: 3 MiB\\n"
        "batchinfer: the CPU kernels run in plain torch, which is slower\\n"
        "batchinfer: warning: odd\\nbatchinfer: error: torn', file=sys.stderr); sys.exit(1)",
    )
    told: list[str] = []
    with pytest.raises(BatchInferError, match="torn"):
        measure(OPTIONS, told.append)
    assert told[:2] == ["the CPU kernels run in plain torch, which is slower", "warning: odd"]
    assert not any("3 MiB" in line for line in told)
