"""The output of a job, from finished rows to files: journal at once, parts when whole, the mark at the end. Opened by
the pipeline, which adds results and finishes; killed at any moment, the next open() carries on."""

import json
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from batchinfer.data.background import Flusher, Worker
from batchinfer.data.claim import JOB_ID_KEY, Claim, check_output, claim_output
from batchinfer.data.journal import Journal
from batchinfer.data.manifest import JobManifest, PartRecord
from batchinfer.data.parquet_input import iter_parquet
from batchinfer.data.parts import PartBuilder, ReadRows
from batchinfer.data.readers import iter_rows
from batchinfer.data.result_schema import TALLY_COLUMNS, Tally, result_schema
from batchinfer.data.row_map import Part, PartMap, Positions, RowMap, Selection
from batchinfer.data.segments import Row, result_characters
from batchinfer.data.shards import Shard
from batchinfer.data.single_file import common_schema, write_single_file
from batchinfer.data.storage import open_storage
from batchinfer.errors import BatchInferError, ErrorCode
from batchinfer.request import Result

_FLUSH_INTERVAL_S = 0.5  # with the write itself, a finished row is safe within a second
_RESULT_BYTES = 1024  # of a Result in memory, beside its text and tokens
_MAX_CHARACTERS = 1 << 28  # of one completion: its UTF-8 stays far below the 2 GiB of an Arrow string


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputJob:
    """What a writer must know of a job.

    selection: per shard the sorted row numbers to answer, or None for all. metadata: strings for the Parquet files'
    metadata (the effective configuration and its sources). model_fingerprint and options bind the output.
    """

    shards: Sequence[Shard]
    selection: Selection | None = None
    rows_per_part: int
    model_fingerprint: str
    options: Mapping[str, Any]
    prefix: str = ""
    token_ids: bool = False
    logprobs: bool = False
    prompt_logprobs: bool = False
    metadata: Mapping[str, str] = field(default_factory=dict)
    read_rows: ReadRows = iter_rows

    def result_schema(self, prefix: str = "") -> pa.Schema:
        return result_schema(
            prefix, token_ids=self.token_ids, logprobs=self.logprobs, prompt_logprobs=self.prompt_logprobs
        )


@dataclass(frozen=True, slots=True)
class FinishedOutput:
    """The same job's finished output stands there already: nothing is to be done."""

    target: str
    manifest: JobManifest


def open_output(target: str, job: OutputJob, overwrite: bool = False) -> "OutputWriter | FinishedOutput":
    """Start or carry on the output at `target`: a directory, or a .parquet or .jsonl[.gz|.zst] file.

    Raises UsageError, before anything is touched, for what check_output refuses, foreign files, another job's output
    (naming what changed) and an output that a process is writing.
    """
    layout = check_output(target, job.shards, job.result_schema(job.prefix))
    storage = open_storage(layout.root, layout.scratch)
    manifest = JobManifest.make(job.shards, job.model_fingerprint, job.options)
    claim = claim_output(storage, layout, manifest, overwrite)
    if isinstance(claim, JobManifest):
        return FinishedOutput(layout.target, claim)
    try:
        return OutputWriter(claim, job)
    except BaseException:
        claim.lock.release()
        raise


class OutputWriter:
    """Takes results in any order. A row counts as done, for good, once all of its samples are in the journal.

    All methods are for one thread, but wanted(), which any thread may call. Failures of the device surface in the next
    call of add(), poll(), flush(), drain() or finish().
    """

    def __init__(self, claim: Claim, job: OutputJob) -> None:
        self._claim, self._job = claim, job
        self._storage, self._layout = claim.storage, claim.layout
        self._rows = RowMap([shard.num_rows for shard in job.shards], job.selection)
        self._parts = PartMap(self._rows, job.rows_per_part)
        folder = self._layout.journal(claim.manifest.job_id)
        schema = job.result_schema()
        self._journal = Journal(self._storage, folder, uuid.uuid4().hex[:8], schema, self._rows)
        appended = job.result_schema(job.prefix)
        self._builder = PartBuilder(job.shards, self._rows, self._journal, appended, job.read_rows)
        self._expected: dict[int, int] = {}  # samples of rows that have several, until they are complete
        self._collected: dict[int, dict[int, Result]] = {}  # their results so far
        self._records: dict[int, PartRecord] = {}  # finished parts
        self._remaining = np.array([part.num_rows for part in self._parts.parts], np.int64)  # rows not journaled
        self._recover()
        self._accepted = bytearray(self._journal.mask(0, self._rows.num_rows).tobytes())
        self.num_resumed = self.num_done = sum(self._accepted)
        self._worker = Worker("batchinfer-parts")
        self._flusher: Flusher[Row] = Flusher("batchinfer-journal", self._journal_rows, _FLUSH_INTERVAL_S)
        for part in self._parts.parts:
            if not self._remaining[part.index] and part.index not in self._records:
                self._worker.submit(partial(self._close_part, part))

    @property
    def num_rows(self) -> int:
        """Input rows to answer, those of earlier runs included; num_done of them have an answer."""
        return self._rows.num_rows

    @property
    def is_resumed(self) -> bool:
        return self._claim.is_resumed

    @property
    def tally(self) -> Tally:
        """Counts over the journaled answers of this and earlier runs."""
        return self._journal.tally

    @property
    def kept(self) -> Mapping[str, Any]:
        """What keep() was given, in an earlier run of the job too."""
        return self._claim.manifest.kept

    def keep(self, **values: Any) -> None:
        """Store what later runs of this job must take over. values: JSON; durable on return."""
        self._claim = replace(self._claim, manifest=replace(self._claim.manifest, kept=values))
        self._storage.put(self._layout.job, self._claim.manifest.to_json())

    def wanted(self, shard: int, start: int, stop: int) -> npt.NDArray[np.bool_]:
        """bool [stop - start]: which of the shard's rows are still to be answered."""
        rows, first = self._rows.within(shard, start, stop)
        mask = np.zeros(stop - start, np.bool_)
        mask[rows - start] = ~self._journal.mask(first, first + len(rows))
        return mask

    def expect(self, shard: int, row: int, num_samples: int) -> None:
        """Say that a row will have num_samples results. Rows of which nothing is said have one."""
        if num_samples > 1:
            self._expected[self._rows.position(shard, row)] = num_samples

    def add(self, results: Sequence[Result]) -> None:
        """Take results. A second answer to a row that has one is dropped."""
        rows = [row for result in results if (row := self._take(result)) is not None]
        self.num_done += len(rows)
        self._flusher.add(rows, sum(result_characters(r) + _RESULT_BYTES for row in rows for r in row))

    def _take(self, result: Result) -> Row | None:
        """The row that this result completes."""
        position = self._rows.position(result.id.shard, result.id.row)
        if self._accepted[position]:
            return None
        num_samples = self._expected.get(position, 1)
        if not 0 <= result.id.sample < num_samples:
            raise ValueError(f"result {result.id}: the row has {num_samples} samples")
        samples = self._collected.pop(position, {})
        samples.setdefault(result.id.sample, _bounded(result))
        if len(samples) < num_samples:
            self._collected[position] = samples
            return None
        self._expected.pop(position, None)
        self._accepted[position] = True
        return tuple(samples[i] for i in range(num_samples))

    def poll(self) -> None:
        """Raise what failed in the background. Call it every step."""
        self._flusher.check()
        self._worker.check()

    def flush(self) -> None:
        """Wait until all complete rows are in the journal."""
        self._flusher.flush()
        self._worker.check()

    def drain(self) -> None:
        """Wait until all complete rows are in the journal and all complete parts are built."""
        self.flush()
        self._worker.drain()

    def finish(self, stats: Mapping[str, Any]) -> None:
        """Write what is left: parts, single file, manifest, stats, the mark; then remove the work folder and end.
        BatchInferError where rows have no answer yet."""
        self.drain()
        missing = self.num_rows - self.num_done
        if missing:
            raise BatchInferError(f"{self._layout.target}: {missing} rows have no answer; run the same command again")
        records = tuple(self._records[part.index] for part in self._parts.parts)
        if self._layout.file:
            records = (self._write_single_file(),)
        manifest = replace(self._claim.manifest, parts=records)
        layout = self._layout
        final = {layout.stats: json.dumps(stats, indent=1).encode(), layout.manifest: manifest.to_json()}
        final.setdefault(layout.mark, b"")
        for name, content in final.items():
            self._storage.put(name, content)
        self._storage.delete_folder(layout.work)
        self.close()

    def close(self) -> None:
        """End the threads and let go of the output; what is complete is journaled first. Raises nothing: failures are
        raised by poll()."""
        self._flusher.stop()
        self._worker.stop()
        self._claim.lock.release()

    def __enter__(self) -> "OutputWriter":
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self.close()
        if kind is None:
            self.poll()

    # In the background

    def _journal_rows(self, rows: Sequence[Row]) -> None:
        positions = self._journal.append(rows)
        for part in self._count(positions):
            self._worker.submit(partial(self._close_part, part))
        if self._journal.needs_compaction():
            self._worker.submit(self._journal.compact)

    def _count(self, positions: Positions) -> list[Part]:
        """Take journaled rows off what remains; returns the parts that this completes."""
        counts = self._parts.count_by_part(positions)
        self._remaining -= counts
        complete = np.flatnonzero((counts > 0) & (self._remaining == 0))
        return [self._parts.parts[i] for i in complete.tolist()]

    def _close_part(self, part: Part) -> None:
        name = self._layout.part(part.name)
        with self._storage.create(name) as file:
            num_rows = self._builder.write(file, part, self._metadata())
        self._note_part(part, num_rows)
        self._journal.release(part.start, part.stop)

    def _note_part(self, part: Part, num_rows: int) -> None:
        name = self._layout.part(part.name)
        self._records[part.index] = PartRecord(name, part.shard, num_rows, self._storage.size(name) or 0)

    def _metadata(self) -> dict[str, str]:
        kept = {f"batchinfer.{name}": json.dumps(value) for name, value in self.kept.items()}
        return {**self._job.metadata, **kept, JOB_ID_KEY: self._claim.manifest.job_id}

    # At the start and at the end

    def _recover(self) -> None:
        for part in self._parts.parts:
            if part.name in self._claim.parts:
                self._note_part(part, self._claim.parts[part.name])
                self._tally_part(part)
        closed = [(self._parts.parts[i].start, self._parts.parts[i].stop) for i in self._records]
        self._journal.recover(closed)
        self._count(np.flatnonzero(self._journal.mask(0, self._rows.num_rows)))

    def _tally_part(self, part: Part) -> None:
        schema = self._job.result_schema(self._job.prefix)
        columns = pa.schema([schema.field(self._job.prefix + name) for name in TALLY_COLUMNS])
        record = self._records[part.index]
        for _, batch in iter_parquet(self._storage.path(record.name), columns, 0, record.num_rows, 1 << 16):
            self._journal.tally.add(batch, self._job.prefix)

    def _write_single_file(self) -> PartRecord:
        name = str(self._layout.file)
        paths = [self._storage.path(self._layout.part(part.name)) for part in self._parts.parts]
        schema = common_schema(self._layout, [shard.schema for shard in self._job.shards])
        with self._storage.create(name) as file:
            num_rows = write_single_file(file, self._layout, paths, schema, self._metadata())
        return PartRecord(name, -1, num_rows, self._storage.size(name) or 0)


def _bounded(result: Result) -> Result:
    """The result, or an error in place of one that no Arrow string can hold."""
    if result.text is None or len(result.text) <= _MAX_CHARACTERS:
        return result
    message = f"the completion has {len(result.text)} characters, more than the {_MAX_CHARACTERS} that a row can hold"
    return Result(result.id, "error", error_code=ErrorCode.COMPLETION_TOO_LARGE, error_message=message)
