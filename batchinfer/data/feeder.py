"""The background thread that reads shards and builds requests ahead of the engine. Started and drained by the
pipeline."""

import queue
import threading
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import numpy.typing as npt

from batchinfer.data.prompts import PromptBuilder
from batchinfer.data.readers import RowBatch, iter_selected
from batchinfer.data.row_map import Selection
from batchinfer.data.shards import Shard
from batchinfer.request import Request, Result

Mask = npt.NDArray[np.bool_]
_READ_ROWS = 512
_FIRST_ROWS = 32  # built together at the beginning, when nothing is known of the rows' samples
_BATCH_ENTRIES = 2048  # about so many requests a batch, however many samples the rows ask for
_QUEUED_BATCHES = 8


class Feeder:
    """Requests, and the results of rows that cannot become requests, in input order.

    selection: per shard the rows to answer, None for all. wanted(shard, start, stop): bool [stop - start], which rows
    are still to be answered; others are read past and never tokenised.
    """

    def __init__(
        self,
        shards: Sequence[Shard],
        selection: Selection,
        builder: PromptBuilder,
        wanted: Callable[[int, int, int], Mask],
    ) -> None:
        self._shards = shards
        self._selection = selection
        self._builder = builder
        self._wanted = wanted
        self._rows_at_once = _FIRST_ROWS
        self._queue: queue.Queue[list[Request | Result] | BaseException | None] = queue.Queue(_QUEUED_BATCHES)
        self._stop = threading.Event()
        self._ended = False
        self._thread = threading.Thread(target=self._run, name="batchinfer-feeder", daemon=True)
        self._thread.start()

    @property
    def is_exhausted(self) -> bool:
        """All rows have been taken."""
        return self._ended

    def take(self, wait: bool) -> list[Request | Result]:
        """The next batch; empty where none is ready (with `wait`: where the input has ended). Raises what the reading
        thread raised."""
        if self._ended:
            return []
        try:
            item = self._queue.get(block=wait)
        except queue.Empty:
            return []
        if isinstance(item, BaseException):
            raise item
        if item is None:
            self._ended = True
            return []
        return item

    def close(self) -> None:
        """Stops reading and waits for the thread."""
        self._stop.set()
        while self._thread.is_alive():
            self._drain()
            self._thread.join(timeout=0.05)
        self._ended = True

    def __enter__(self) -> "Feeder":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _drain(self) -> None:
        """Makes room, so that the thread sees that it is to stop."""
        try:
            while True:
                self._queue.get_nowait()
        except queue.Empty:
            pass

    def _run(self) -> None:
        try:
            for batch in self._build():
                self._queue.put(batch)
                if self._stop.is_set():
                    return
            self._queue.put(None)
        except BaseException as error:  # handed to the thread that takes
            self._queue.put(error)

    def _build(self) -> Iterator[list[Request | Result]]:
        for shard, selected in zip(self._shards, self._selection, strict=True):
            columns = [name for name in self._builder.columns if name in shard.schema.names]
            for rows in iter_selected(shard, selected, columns=columns, batch_rows=_READ_ROWS):
                wanted = self._wanted(shard.index, rows.start, rows.start + rows.num_rows)
                entries: list[Request | Result] = []
                for run in rows.runs(wanted):
                    for piece in self._build_run(shard.index, run):
                        entries += piece
                        if len(entries) >= _BATCH_ENTRIES:
                            yield entries
                            entries = []
                if entries:
                    yield entries

    def _build_run(self, shard_index: int, run: RowBatch) -> Iterator[list[Request | Result]]:
        start = 0
        while start < run.num_rows:
            rows = run.slice(start, min(self._rows_at_once, run.num_rows - start))
            entries = self._builder.build(shard_index, rows)
            yield entries
            start += rows.num_rows
            fitting = max(1, _BATCH_ENTRIES * rows.num_rows // len(entries))
            self._rows_at_once = min(fitting, 2 * self._rows_at_once, _READ_ROWS)
