"""What a person sees while layers are quantised: a tqdm bar on a terminal, a plain line every 30 seconds elsewhere.
Driven by quantize_job."""

import sys
import time
from collections.abc import Callable
from typing import Any, TextIO

from batchinfer.units import format_duration

_LINE_INTERVAL_S = 30.0
_BAR_FORMAT = "{percentage:3.0f}%|{bar}| {desc} [{elapsed}<{remaining}]"


class LayerProgress:
    """steps: modules of all layers; done: those of earlier runs, which no time of this run went into."""

    def __init__(
        self,
        num_layers: int,
        modules_a_layer: int,
        layers_done: int,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._stream = stream if stream is not None else sys.stderr
        self._clock = clock
        self._num_layers = num_layers
        self._modules = modules_a_layer
        self._first = self._done = layers_done * modules_a_layer
        self._start = self._shown = clock()
        self._bar: Any = self._make_bar() if self._stream.isatty() else None

    def advance(self) -> None:
        """One more module is done."""
        self._done += 1
        if self._bar is not None:
            self._bar.set_description_str(self._layers(), refresh=False)
            self._bar.update(1)
        elif self._clock() - self._shown >= _LINE_INTERVAL_S:
            self._shown = self._clock()
            print(f"batchinfer: {self.line()}", file=self._stream, flush=True)

    def line(self) -> str:
        total = self._num_layers * self._modules
        elapsed = self._clock() - self._start
        left = elapsed * (total - self._done) / max(self._done - self._first, 1)
        return f"{self._done / total:.0%}, {self._layers()}, {format_duration(left)} left"

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()

    def _layers(self) -> str:
        return f"{self._done // self._modules}/{self._num_layers} layers"

    def _make_bar(self) -> Any:
        from tqdm import tqdm  # here, as a scheduler's jobs have no terminal

        total = self._num_layers * self._modules
        return tqdm(total=total, initial=self._done, bar_format=_BAR_FORMAT, file=self._stream, dynamic_ncols=True)
