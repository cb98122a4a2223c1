"""The files of the journal: Arrow IPC with zstd, some record batches each. Used by journal.py alone."""

import re
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from batchinfer.data.result_schema import record_bytes, results_to_batch
from batchinfer.data.storage import Storage
from batchinfer.request import Result

Row = tuple[Result, ...]  # the results of all samples of one input row, in order

KEYS = [pa.field("shard", pa.int32()), pa.field("row", pa.int64()), pa.field("num_samples", pa.int32())]
NAME = re.compile(r"(?P<number>\d{8,})-(?P<level>\d)-(?P<writer>[0-9a-z]+)\.arrow")
MAX_RECORDS = 1024  # of a record batch
_MAX_CHARACTERS = 8 << 20  # UTF-8 takes at most 4 bytes each, so a batch of several records holds 32 MiB of text
_CACHED_BYTES = 32 << 20
_CACHED_FILES = 64


def segment_name(number: int, level: int, writer_id: str) -> str:
    return f"{number:08d}-{level}-{writer_id}.arrow"


@dataclass(frozen=True, slots=True)
class Records:
    """What the index keeps of a run of records: arrays of one entry a record."""

    shard: npt.NDArray[np.int32]
    row: npt.NDArray[np.int64]
    sample: npt.NDArray[np.int32]
    num_samples: npt.NDArray[np.int32]
    nbytes: npt.NDArray[np.int64]

    @classmethod
    def of(cls, batches: Iterable[pa.RecordBatch]) -> "Records":
        parts = [
            (*(b[k].to_numpy() for k in ("shard", "row", "sample_index", "num_samples")), record_bytes(b))
            for b in batches
        ]
        return cls(*(np.concatenate(arrays) for arrays in zip(*parts, strict=True)))


def row_batches(rows: Iterable[Row], schema: pa.Schema) -> list[pa.RecordBatch]:
    """Record batches of bounded size with the rows' results; schema is KEYS and then the result columns."""
    result_schema = pa.schema(list(schema)[len(KEYS) :])
    batches = []
    for run in _runs(rows):
        results = [result for result, _ in run]
        keys = [[r.id.shard for r in results], [r.id.row for r in results], [n for _, n in run]]
        arrays = [pa.array(values, f.type) for values, f in zip(keys, KEYS, strict=True)]
        payload = results_to_batch(results, result_schema)
        batches.append(pa.RecordBatch.from_arrays([*arrays, *payload.columns], schema=schema))
    return batches


def _runs(rows: Iterable[Row]) -> Iterator[list[tuple[Result, int]]]:
    run: list[tuple[Result, int]] = []
    characters = 0
    for row in rows:
        for result in row:
            size = result_characters(result)
            if run and (len(run) == MAX_RECORDS or characters + size > _MAX_CHARACTERS):
                yield run
                run, characters = [], 0
            run.append((result, len(row)))
            characters += size
    if run:
        yield run


def result_characters(result: Result) -> int:
    return len(result.text or "") + len(result.error_message or "") + 16 * (result.completion_tokens or 0)


def write_batches(file: Any, schema: pa.Schema, batches: Iterable[pa.RecordBatch]) -> None:
    """Write a segment's content to a file object."""
    options = pa.ipc.IpcWriteOptions(compression="zstd")
    with pa.ipc.new_file(pa.PythonFile(file, mode="w"), schema, options=options) as writer:
        for batch in batches:
            writer.write_batch(batch)


def read_batches(storage: Storage, name: str, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    """All batches of a segment, decoded and checked. ArrowInvalid, OSError or ValueError where the file is damaged."""
    with storage.open(name) as file, pa.ipc.open_file(pa.PythonFile(file, mode="r")) as reader:
        if reader.schema != schema:
            raise ValueError("its columns are not those of this job")
        for i in range(reader.num_record_batches):
            batch = reader.get_batch(i)
            batch.validate(full=True)
            yield batch


class BatchReader:
    """Reads single record batches; keeps the last used ones decoded, within a byte limit."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._readers: OrderedDict[str, pa.ipc.RecordBatchFileReader] = OrderedDict()
        self._batches: OrderedDict[tuple[str, int], pa.RecordBatch] = OrderedDict()
        self._nbytes = 0

    def batch(self, name: str, number: int) -> pa.RecordBatch:
        key = (name, number)
        if key not in self._batches:
            self._batches[key] = self._reader(name).get_batch(number)
            self._nbytes += self._batches[key].nbytes
        self._batches.move_to_end(key)
        batch = self._batches[key]
        while self._nbytes > _CACHED_BYTES and len(self._batches) > 1:
            self._nbytes -= self._batches.popitem(last=False)[1].nbytes
        return batch

    def _reader(self, name: str) -> pa.ipc.RecordBatchFileReader:
        if name not in self._readers:
            self._readers[name] = pa.ipc.open_file(pa.PythonFile(self._storage.open(name), mode="r"))
        self._readers.move_to_end(name)
        if len(self._readers) > _CACHED_FILES:
            self._readers.popitem(last=False)
        return self._readers[name]

    def forget(self, name: str) -> None:
        self._readers.pop(name, None)
        for key in [key for key in self._batches if key[0] == name]:
            self._nbytes -= self._batches.pop(key).nbytes


def byte_slices(nbytes: npt.NDArray[np.integer[Any]], max_bytes: int, max_records: int) -> Iterator[slice]:
    """Cut a run of records into slices of at most max_bytes and max_records; a larger record stands alone."""
    ends = np.cumsum(nbytes, dtype=np.int64)
    start = 0
    while start < len(ends):
        before = int(ends[start - 1]) if start else 0
        stop = int(np.searchsorted(ends, before + max_bytes, side="right"))
        stop = max(min(stop, start + max_records), start + 1)
        yield slice(start, stop)
        start = stop
