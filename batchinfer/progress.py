"""What a person sees while a job runs: a bar weighted by tokens on a terminal, a plain line every 30 seconds elsewhere.
Driven by the pipeline and by evaluation/."""

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TextIO

from batchinfer.units import format_duration

_BAR_INTERVAL_S = 0.5
_LINE_INTERVAL_S = 30.0
_BAR_FORMAT = "{percentage:3.0f}%|{bar}| {desc} [{elapsed}<{remaining}]"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgressFigures:
    """How far a job is. Tokens are those of prompts and completions together, and only of this run."""

    rows_done: int  # of all runs
    rows_done_here: int  # of this run
    errors: int
    tokens_of_rows_done: int  # of the rows of rows_done_here
    tokens_computed: int  # the former and those of the rows that run
    output_tokens: int  # completion tokens computed


class Progress:
    """Of a job's rows. Cheap to update each step; shows itself when it is due.

    How many tokens the job has is known only at its end, so the rest of the rows counts as the mean of those done.
    """

    def __init__(
        self,
        num_rows: int,
        *,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._num_rows = num_rows
        self._display = _Display(stream, clock)

    def update(self, figures: ProgressFigures) -> None:
        if self._display.is_due():
            self._show(figures)

    def close(self, figures: ProgressFigures) -> None:
        """Shows the last figures and leaves the terminal to what follows."""
        self._show(figures)
        self._display.close()

    def _show(self, figures: ProgressFigures) -> None:
        rate = figures.output_tokens / self._display.elapsed()
        errors = f"{figures.errors:,} error{'' if figures.errors == 1 else 's'}"
        text = f"{figures.rows_done:,}/{self._num_rows:,} rows, {rate:,.0f} output tokens/s, {errors}"
        self._display.show(share_done(figures, self._num_rows), text)


class WorkProgress:
    """Of work whose amount is known beforehand, as in "12,000/70,000 tokens, 1,500 tokens/s"."""

    def __init__(
        self,
        total: int,
        unit: str,
        *,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._total = total
        self._unit = unit
        self._done = 0
        self._display = _Display(stream, clock)

    def add(self, amount: int) -> None:
        self._done += amount
        if self._display.is_due():
            self._show()

    def close(self) -> None:
        """Shows the last figures and leaves the terminal to what follows."""
        self._show()
        self._display.close()

    def _show(self) -> None:
        rate = self._done / self._display.elapsed()
        text = f"{self._done:,}/{self._total:,} {self._unit}, {rate:,.0f} {self._unit}/s"
        self._display.show(self._done / self._total, text)


class _Display:
    """A bar on a terminal, else lines."""

    def __init__(self, stream: TextIO | None, clock: Callable[[], float]) -> None:
        self._stream = stream if stream is not None else sys.stderr
        self._clock = clock
        self._start = clock()
        self._interval_s = _BAR_INTERVAL_S if self._stream.isatty() else _LINE_INTERVAL_S
        self._due = self._start + self._interval_s
        self._bar: Any = self._make_bar() if self._stream.isatty() else None

    def is_due(self) -> bool:
        """Whether it is time to show figures; asked before each showing."""
        now = self._clock()
        if now < self._due:
            return False
        self._due = now + self._interval_s
        return True

    def elapsed(self) -> float:
        """Seconds since the start, above 0."""
        return max(self._clock() - self._start, 1e-9)

    def show(self, share: float | None, text: str) -> None:
        """share: of the work, 0 to 1; None where it is not known."""
        if self._bar is None:
            percent = "" if share is None else f"{share if share == 1 else min(share, 0.99):.0%}, "
            left = _time_left(share, self.elapsed())
            print(f"batchinfer: {percent}{text}, {left}", file=self._stream, flush=True)
        else:
            self._bar.total, self._bar.n = (None, 0) if share is None else (1.0, share)
            self._bar.set_description_str(text)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()

    def _make_bar(self) -> Any:
        from tqdm import tqdm  # here, as most runs of a scheduler have no terminal

        return tqdm(total=1, bar_format=_BAR_FORMAT, file=self._stream, smoothing=0, dynamic_ncols=True)


def _time_left(share: float | None, elapsed: float) -> str:
    """In words. share: as of share_done; elapsed: seconds."""
    if share == 1:
        return f"done in {format_duration(elapsed)}"
    return f"{format_duration(elapsed * (1 - share) / share)} left" if share else "? left"


def share_done(figures: ProgressFigures, num_rows: int) -> float | None:
    """Share, 0 to 1, of this run's tokens that are computed; None before the first row is done."""
    if figures.rows_done >= num_rows:
        return 1.0
    if figures.rows_done_here == 0 or figures.tokens_of_rows_done == 0:
        return None
    mean = figures.tokens_of_rows_done / figures.rows_done_here
    rows_left = num_rows - figures.rows_done
    total = figures.tokens_of_rows_done + mean * rows_left
    return min(figures.tokens_computed / total, 0.999)  # the rows that run may be longer than the mean
