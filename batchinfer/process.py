"""What a run must know of its own process: peak memory, versions, signals. Plain; used by the pipeline."""

import importlib.metadata
import platform
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

_PACKAGES = ("batchinfer", "torch", "triton", "transformers", "tokenizers", "pyarrow", "datasets", "numpy")


def peak_memory_bytes() -> int:
    """Most resident memory that the process has had since its program began."""
    import resource

    with suppress(OSError):  # where /proc is not Linux's, or not there
        for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
            if line.startswith("VmHWM:"):  # ru_maxrss would count what the program that started this one had
                return int(line.split()[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def versions() -> dict[str, str]:
    """Of Python, the system and the packages that answers may depend on; those not installed are left out."""
    found = {"python": platform.python_version(), "system": platform.platform()}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


class StopSignals:
    """Within it, SIGINT and SIGTERM raise KeyboardInterrupt; within `deferred()`, the first one only sets `received`.

    Does nothing outside the main thread, where Python delivers no signals.
    """

    _SIGNALS = (signal.SIGINT, signal.SIGTERM)

    def __init__(self) -> None:
        self.received = False
        self._raises = True

    def __enter__(self) -> "StopSignals":
        self._previous = {}
        if threading.current_thread() is threading.main_thread():
            self._previous = {number: signal.signal(number, self._handle) for number in self._SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """The caller asks for `received` often, and ends in order."""
        self._raises = False
        try:
            yield
        finally:
            self._raises = True

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._raises or self.received:
            raise KeyboardInterrupt
        self.received = True
