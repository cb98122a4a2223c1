"""The main loop of one replica: rows from a feeder into an engine, results into a sink. Driven by the pipeline."""

import time
from collections.abc import Callable, Sequence
from enum import Enum
from typing import Protocol

from batchinfer.config import LimitsConfig, SchedulerConfig
from batchinfer.data.feeder import Feeder
from batchinfer.engine.engine import Engine
from batchinfer.process import StopSignals
from batchinfer.request import Request, Result
from batchinfer.scheduling.intake import Intake
from batchinfer.scheduling.window import Window


class Ending(Enum):
    """Why a loop ended."""

    COMPLETE = "every row is answered"
    INTERRUPTED = "a signal came"
    DEADLINE = "the deadline passed"
    TOO_MANY_ERRORS = "more rows failed than allowed"


class Sink(Protocol):
    """Where results go."""

    def expect(self, shard: int, row: int, num_samples: int) -> None:
        """Said of each row before its results come."""

    def add(self, results: Sequence[Result]) -> None:
        """Called after each step, with what it finished, if anything."""


class Discard:
    """The sink of a job whose answers nobody reads."""

    def expect(self, shard: int, row: int, num_samples: int) -> None:
        pass

    def add(self, results: Sequence[Result]) -> None:
        pass


class EndingRules:
    """What ends a job early: a signal, the deadline, too many failed rows. start: seconds, time.monotonic."""

    def __init__(self, limits: LimitsConfig, num_rows: int, start: float, signals: StopSignals) -> None:
        self._deadline = None if limits.deadline is None else start + limits.deadline
        self._max_failed_rows = limits.max_failed_rows(num_rows)
        self._signals = signals

    def has_too_many(self, errors: int) -> bool:
        return self._max_failed_rows is not None and errors > self._max_failed_rows

    def ending(self, errors: int) -> Ending | None:
        if self._signals.received:
            return Ending.INTERRUPTED
        if self.has_too_many(errors):
            return Ending.TOO_MANY_ERRORS
        if self._deadline is not None and time.monotonic() >= self._deadline:
            return Ending.DEADLINE
        return None


def run_loop(
    engine: Engine, feeder: Feeder, sink: Sink, config: SchedulerConfig, should_end: Callable[[], Ending | None]
) -> Ending:
    """Runs until every row is answered or `should_end`, asked before each step, names another ending.

    After a deadline the rows that have started are finished and no other starts, unless a signal comes; after any other
    ending they are left.
    """
    source = _Source(engine, feeder, sink, config)
    while not source.is_exhausted or engine.has_unfinished:
        ending = should_end()
        if ending is Ending.DEADLINE:
            _finish_running(engine, sink, should_end)
        if ending is not None:
            return ending
        source.top_up()
        results = engine.step()
        source.intake.num_finished += len(results)
        sink.add(results)
    return Ending.COMPLETE


class _Source:
    """Rows on their way from the feeder through the window to the engine."""

    def __init__(self, engine: Engine, feeder: Feeder, sink: Sink, config: SchedulerConfig) -> None:
        self._engine = engine
        self._feeder = feeder
        self._sink = sink
        self._config = config
        self._window = Window(config, engine.block_size, engine.expected_output_tokens)
        self.intake = Intake(config, self._window, lambda: engine.num_waiting, self._start)

    @property
    def is_exhausted(self) -> bool:
        """The engine has been given all rows."""
        return self._feeder.is_exhausted and not len(self._window)

    def top_up(self) -> None:
        """Before each step."""
        self._read()
        self.intake.top_up()

    def _start(self, row: list[Request]) -> None:
        self._sink.expect(row[0].id.shard, row[0].id.row, row[0].params.n)
        for request in row:
            self._engine.add(request)

    def _read(self) -> None:
        """Takes what is ready. Waits only where there is nothing else to do, and before a static batch, which would
        otherwise start with the few rows that are ready."""
        gathers = self._config.batching == "static" and self._engine.num_running == 0
        while not self._window.is_full and not self._feeder.is_exhausted:
            has_work = self._engine.has_unfinished or len(self._window) > 0
            entries = self._feeder.take(wait=gathers or not has_work)
            if not entries:
                return
            self._window.add([entry for entry in entries if isinstance(entry, Request)])
            self._sink.add([entry for entry in entries if isinstance(entry, Result)])
            if not self._engine.has_unfinished and not len(self._window):
                return  # rows that cannot be answered, perhaps millions: whether to end is asked in between


def _finish_running(engine: Engine, sink: Sink, should_end: Callable[[], Ending | None]) -> None:
    engine.drop_unstarted()
    while engine.has_unfinished and should_end() is not Ending.INTERRUPTED:
        sink.add(engine.step())
