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

    After a deadline the rows that have started are finished
    and no other starts, unless a signal comes; after any other ending they are left.
    """
    while not feeder.is_exhausted or engine.has_unfinished:
        ending = should_end()
        if ending is Ending.DEADLINE:
            _finish_running(engine, sink, should_end)
        if ending is not None:
            return ending
        _feed(engine, feeder, sink, config)
        sink.add(engine.step())
    return Ending.COMPLETE


def _feed(engine: Engine, feeder: Feeder, sink: Sink, config: SchedulerConfig) -> None:
    """Tops up the waiting queue; waits for the reader only where the engine has nothing to do, and before a static
    batch, which would otherwise start with the few rows that are ready."""
    gathers = config.batching == "static" and engine.num_running == 0
    while engine.num_waiting < config.max_num_seqs and not feeder.is_exhausted:
        entries = feeder.take(wait=gathers or not engine.has_unfinished)
        if not entries:
            return
        for entry in entries:
            if isinstance(entry, Request) and entry.id.sample == 0:
                sink.expect(entry.id.shard, entry.id.row, entry.params.n)
            if isinstance(entry, Request):
                engine.add(entry)
        sink.add([entry for entry in entries if isinstance(entry, Result)])


def _finish_running(engine: Engine, sink: Sink, should_end: Callable[[], Ending | None]) -> None:
    engine.drop_unstarted()
    while engine.has_unfinished and should_end() is not Ending.INTERRUPTED:
        sink.add(engine.step())
