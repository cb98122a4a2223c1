"""One measurement of a job in a process of its own: `batchinfer bench throughput` as a user would call it. Called by
compare.py for each run.

A process for each run, not one for all, because peak memory is then the run's own, nothing of the former run is left
(weights, cache, threads, the allocator's arenas), and the figures are those of the command that anybody can repeat.
"""

import json
import re
import signal
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from batchinfer.config import iter_options
from batchinfer.errors import BatchInferError, ExitCode, UsageError
from batchinfer.options import EffectiveOptions

_START = "from batchinfer.cli.main import main; main()"
_ERROR = "batchinfer: error: "
_PROGRESS = re.compile(r"batchinfer: (\d+%, )?[\d,]+/[\d,]+ rows, ")  # progress.py's lines
_WARNING = re.compile(r"batchinfer: (warning: |the CPU kernel)")  # the latter: that they run in plain torch
_END_SECONDS = 5.0


def flags(options: EffectiveOptions) -> list[str]:
    """The flags of `run` that give these options; those at their defaults are left out."""
    return flags_of({name: value for name, (value, source) in options.items() if source != "default"})


def flags_of(values: Mapping[str, Any]) -> list[str]:
    """values: of run's options, by name; None is left to the default."""
    found: list[str] = []
    for _, member in iter_options():
        value = values.get(member.name)
        flag = "--" + member.name.replace("_", "-")
        if member.metadata["kind"] == "flag" and value is not None:
            found.append(flag if value else f"--no-{flag[2:]}")
        elif value is not None:
            found += [f"{flag}={item}" for item in (value if isinstance(value, tuple) else (value,))]
    return found


def measure(options: EffectiveOptions, report: Callable[[str], None]) -> dict[str, Any]:
    """The figures of `bench throughput --json`. report: gets the lines that tell how far it is, and warnings.

    Raises BatchInferError or UsageError with the run's own message, and KeyboardInterrupt where the run was
    interrupted; whatever is raised, the process has ended.
    """
    with tempfile.TemporaryDirectory(prefix="batchinfer-") as folder:
        figures = Path(folder) / "figures.json"
        arguments = ["bench", "throughput", f"--json={figures}", *flags(options)]
        code, lines = _run([sys.executable, "-P", "-c", _START, *arguments], report)
        if code != ExitCode.DONE:
            raise _failure(code, lines)
        return json.loads(figures.read_text(encoding="utf-8"))


def _run(command: list[str], report: Callable[[str], None]) -> tuple[int, list[str]]:
    """The exit code and the last lines of stderr."""
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
    )
    last: deque[str] = deque(maxlen=20)
    try:
        assert process.stderr is not None
        for line in process.stderr:
            last.append(line.rstrip())
            if _is_news(line):
                report(line.rstrip().removeprefix("batchinfer: "))
        return process.wait(), list(last)
    finally:
        _end(process)


def _is_news(line: str) -> bool:
    """What a run says at its start is the same in each; progress, warnings and what other libraries say is not."""
    is_told = _PROGRESS.match(line) or _WARNING.match(line)
    return bool(is_told) or not (line.isspace() or line.startswith("batchinfer: "))


def _end(process: "subprocess.Popen[str]") -> None:
    """Does nothing where the process has ended. Ctrl-C reaches it beside us; then this is the second signal, after
    which a run does not wait for its step."""
    try:
        if process.poll() is None:
            process.terminate()
            process.wait(_END_SECONDS)
    except subprocess.TimeoutExpired:
        pass
    finally:
        process.kill()
        process.wait()
        assert process.stderr is not None
        process.stderr.close()


def _failure(code: int, lines: list[str]) -> BaseException:
    if code == ExitCode.INTERRUPTED:
        return KeyboardInterrupt()
    said = next((line.removeprefix(_ERROR) for line in reversed(lines) if line.startswith(_ERROR)), None)
    if code < 0:
        name = signal.Signals(-code).name
        hint = "; the system may be short of memory" if name == "SIGKILL" else ""
        return BatchInferError(f"the run was ended by {name}{hint}")
    message = said or next((line for line in reversed(lines) if line.strip()), f"the run ended with exit code {code}")
    return UsageError(message) if code == ExitCode.USAGE else BatchInferError(message)
