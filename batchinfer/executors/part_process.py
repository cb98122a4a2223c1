"""Follows a part of the check of a GPU that runs in a process of its own. Called by gpu_check.py."""

import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from typing import IO, Any

from batchinfer.units import format_duration

START = "from batchinfer.executors.device_part import main; main()"
OUT_OF_TIME = "it did not end within its time"
Take = Callable[[Mapping[str, Any]], None]


def run_part(task: Mapping[str, Any], limit_s: float, silent_s: float, take: Take) -> str | None:
    """Hands each event of device_part to `take`. Returns why the process did not come to its own end, None where it
    did. limit_s: after which it is ended; silent_s: for which it may tell nothing. Whatever is raised, it has ended."""
    command = [sys.executable, "-P", "-c", START, json.dumps(task)]
    with tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors)
        try:
            end = time.monotonic() + limit_s
            for line in _lines(process, end, silent_s):
                take(json.loads(line))
            code = process.wait(max(0.0, end - time.monotonic()))
        except TimeoutError as error:
            return str(error)
        except subprocess.TimeoutExpired:
            return OUT_OF_TIME
        finally:
            process.kill()
            process.wait()
            assert process.stdout is not None
            process.stdout.close()
        return None if code == 0 else _failure(code, errors)


def _lines(process: "subprocess.Popen[bytes]", end: float, silent_s: float) -> Iterator[bytes]:
    """Raises TimeoutError."""
    assert process.stdout is not None
    pipe, begun = process.stdout.fileno(), b""
    while True:
        left_s = end - time.monotonic()
        if not select.select([pipe], [], [], max(0.0, min(left_s, silent_s)))[0]:
            raise TimeoutError(f"nothing came for {format_duration(silent_s)}" if silent_s < left_s else OUT_OF_TIME)
        read = os.read(pipe, 1 << 16)
        if not read:
            return
        *lines, begun = (begun + read).split(b"\n")
        yield from lines


def _failure(code: int, errors: IO[bytes]) -> str:
    """The signal or the exit code, and the last line of stderr."""
    errors.seek(0)
    said = [line.strip() for line in errors.read().decode(errors="replace").splitlines() if line.strip()]
    ended = f"ended by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
    return f"{ended}: {said[-1]}" if said else ended
