"""Wall time by phase of a job. Plain; used by the pipeline."""

import time
from collections.abc import Iterator
from contextlib import contextmanager


class Phases:
    """Seconds spent in each phase, in the order in which the phases first began."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        """Adds the time spent within to the phase."""
        self.seconds.setdefault(phase, 0.0)
        start = time.monotonic()
        try:
            yield
        finally:
            self.seconds[phase] += time.monotonic() - start
