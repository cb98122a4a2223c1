"""What a person sees while a job runs: a bar weighted by tokens on a terminal, a plain line every 30 seconds elsewhere.
Driven by the pipeline."""

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
    """Cheap to update each step; shows itself when it is due.

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
        self._stream = stream if stream is not None else sys.stderr
        self._clock = clock
        self._start = clock()
        self._interval_s = _BAR_INTERVAL_S if self._stream.isatty() else _LINE_INTERVAL_S
        self._due = self._start + self._interval_s
        self._bar: Any = self._make_bar() if self._stream.isatty() else None

    def update(self, figures: ProgressFigures) -> None:
        now = self._clock()
        if now >= self._due:
            self._due = now + self._interval_s
            self._show(figures, now)

    def close(self, figures: ProgressFigures) -> None:
        """Shows the last figures and leaves the terminal to what follows."""
        self._show(figures, self._clock())
        if self._bar is not None:
            self._bar.close()

    def _make_bar(self) -> Any:
        from tqdm import tqdm  # here, as most runs of a scheduler have no terminal

        return tqdm(total=1, bar_format=_BAR_FORMAT, file=self._stream, smoothing=0, dynamic_ncols=True)

    def _show(self, figures: ProgressFigures, now: float) -> None:
        elapsed = max(now - self._start, 1e-9)
        text = (
            f"{figures.rows_done:,}/{self._num_rows:,} rows, {figures.output_tokens / elapsed:,.0f} output tokens/s, "
            f"{figures.errors:,} errors"
        )
        share = share_done(figures, self._num_rows)
        if self._bar is None:
            percent = "" if share is None else f"{share:.0%}, "
            print(f"batchinfer: {percent}{text}, {_time_left(share, elapsed)}", file=self._stream, flush=True)
        else:
            self._bar.total, self._bar.n = (None, 0) if share is None else (1.0, share)
            self._bar.set_description_str(text)


def _time_left(share: float | None, elapsed: float) -> str:
    """In words. share: as of share_done; elapsed: seconds."""
    if share == 1:
        return f"done in {format_duration(elapsed)}"
    return "? left" if share is None else f"{format_duration(elapsed * (1 - share) / share)} left"


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
