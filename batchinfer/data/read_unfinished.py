"""The answers that an unfinished job has on storage so far, in the order of its input: whole parts, and the journal.
Reads only, also while a run is at work. Used by `batchinfer show`."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from batchinfer.config import InputConfig
from batchinfer.data.claim import find_job, inspect_part
from batchinfer.data.files import locate
from batchinfer.data.json_lines import to_rows
from batchinfer.data.manifest import JobManifest
from batchinfer.data.output_layout import PART_NAME, OutputLayout
from batchinfer.data.parquet_input import inspect_parquet, iter_parquet
from batchinfer.data.read_output import OutputRow, ResultColumns
from batchinfer.data.readers import iter_selected
from batchinfer.data.result_schema import result_schema
from batchinfer.data.segments import KEYS, NAME, read_batches
from batchinfer.data.shards import Shard, discover
from batchinfer.data.storage import Storage, open_storage
from batchinfer.errors import BatchInferError, UsageError

_CHUNK_ROWS = 64  # become Python values together
_KEY_ROWS = 16384
_NOTHING = np.zeros(0, np.int64)


@dataclass(frozen=True, slots=True)
class _Answers:
    """Where answers stand, one entry each: the source and the place in it, and what they answer."""

    shard: npt.NDArray[np.int64]
    row: npt.NDArray[np.int64]
    sample: npt.NDArray[np.int64]
    source: npt.NDArray[np.int64]
    place: npt.NDArray[np.int64]
    failed: npt.NDArray[np.bool_]

    def __len__(self) -> int:
        return len(self.shard)

    def take(self, chosen: Any) -> "_Answers":
        return _Answers(*(getattr(self, name)[chosen] for name in _Answers.__slots__))


class UnfinishedOutput:
    """What there is of a job's output. Raises UsageError where a run at work takes files away meanwhile."""

    def __init__(self, storage: Storage, layout: OutputLayout, manifest: JobManifest) -> None:
        self.manifest = manifest
        self._storage = storage
        self._target = layout.target
        names = sorted(name for name in storage.list(layout.parts.rstrip("/")) if PART_NAME.fullmatch(name))
        folder = layout.journal(manifest.job_id)
        own = [layout.part(name) for name in names if inspect_part(storage, layout, name)[0] == manifest.job_id]
        self._num_parts = len(own)
        self._sources = own + [f"{folder}/{name}" for name in storage.list(folder) if NAME.fullmatch(name)]
        options = manifest.options
        result = result_schema(
            token_ids=bool(options.get("output_token_ids")),
            logprobs=options.get("logprobs") is not None,
            prompt_logprobs=bool(options.get("prompt_logprobs")),
        )
        self._shards: dict[int, Shard | None] = {}  # those looked at; None where the file is not there as it was
        self._segment_schema = pa.schema([*KEYS, *result])

    @property
    def num_rows(self) -> int:
        """Input rows that the job is to answer."""
        total = sum(shard.num_rows for shard in self.manifest.shards)
        chosen = [self.manifest.options.get(name) for name in ("limit", "sample")]
        return min([total, *(number for number in chosen if number is not None)])

    @property
    def num_done(self) -> int:
        """Of these, how many have an answer."""
        return int((self._answers.sample == 0).sum())

    def changed_files(self) -> list[str]:
        """Input files that answers without columns of their own stand for, which are not there as they were."""
        in_journal = self._answers.shard[self._answers.source >= self._num_parts]
        return [self.manifest.shards[n].uri for n in np.unique(in_journal).tolist() if self._shard(n) is None]

    def rows(self, ranges: Sequence[range], only_errors: bool = False) -> Iterator[OutputRow]:
        """Answers by their number among those that there are; a row whose input file is no more as it was has no
        input columns. ranges: as of iter_output."""
        answers = self._answers
        within = [np.arange(r.start, min(r.stop, len(answers))) for r in ranges]
        numbers = np.concatenate([_NOTHING, *within])
        if only_errors:
            numbers = numbers[answers.failed[numbers]]
        for start in range(0, len(numbers), _CHUNK_ROWS):
            chunk = numbers[start : start + _CHUNK_ROWS]
            yield from self._read(chunk.tolist(), answers.take(chunk))

    @cached_property
    def _answers(self) -> _Answers:
        """In the order of the input, each once: a crash may leave a row in a part and in the journal."""
        found = [keys for number in range(len(self._sources)) for keys in self._keys(number)]
        columns = (np.concatenate([_NOTHING, *(getattr(a, name) for a in found)]) for name in _Answers.__slots__)
        every = _Answers(*columns)
        every = every.take(np.lexsort((every.source, every.sample, every.row, every.shard)))
        same = [np.diff(column, prepend=-1) == 0 for column in (every.shard, every.row, every.sample)]
        unique = every.take(~(same[0] & same[1] & same[2]))
        return replace(unique, failed=unique.failed.astype(np.bool_))

    def _keys(self, source: int) -> Iterator[_Answers]:
        place = 0
        for batch in self._key_batches(source):
            shard, row, sample, failed = _batch_keys(batch)
            places = np.arange(place, place + len(row))
            yield _Answers(shard, row, sample, np.full(len(row), source), places, failed)
            place += len(row)

    def _key_batches(self, source: int) -> Iterator[pa.RecordBatch]:
        name = self._sources[source]
        if source >= self._num_parts:
            yield from self._segment(name)
            return
        path = self._storage.path(name)
        schema, num_rows = inspect_parquet(locate(path))
        columns = ResultColumns(schema.names, path).results(("request_id", "finish_reason"))
        wanted = pa.schema([schema.field(name) for name, short in columns.items() if short != "input_id"])
        for _, batch in iter_parquet(path, wanted, 0, num_rows, _KEY_ROWS):
            yield batch.rename_columns([columns[name] for name in wanted.names])

    def _segment(self, name: str) -> Iterator[pa.RecordBatch]:
        """Nothing where it is damaged: the next run computes its rows again."""
        try:
            yield from read_batches(self._storage, name, self._segment_schema)
        except FileNotFoundError as error:
            raise UsageError(f"{self._target}: a run is at work on it and took a file away; try again") from error
        except (pa.ArrowException, OSError, ValueError):
            return

    def _read(self, numbers: Sequence[int], answers: _Answers) -> Iterator[OutputRow]:
        found: dict[int, OutputRow] = {}
        for source in np.unique(answers.source).tolist():
            here = np.flatnonzero(answers.source == source)
            of_source = answers.take(here)
            read = self._part_rows if source < self._num_parts else self._journal_rows
            for entry, row in zip(here.tolist(), read(source, of_source), strict=True):
                found[entry] = row._replace(number=numbers[entry])
        for entry in range(len(numbers)):
            yield found[entry]

    def _part_rows(self, source: int, answers: _Answers) -> list[OutputRow]:
        path = self._storage.path(self._sources[source])
        schema, _ = inspect_parquet(locate(path))
        columns = ResultColumns(schema.names, path)
        wanted = set(answers.place.tolist())
        first, last = int(answers.place[0]), int(answers.place[-1])
        rows = []
        for start, batch in iter_parquet(path, schema, first, last + 1, _CHUNK_ROWS):
            places = [place - start for place in range(start, start + batch.num_rows) if place in wanted]
            rows += [columns.row(0, values) for values in to_rows(batch.take(pa.array(places, pa.int64())))]
        return rows

    def _journal_rows(self, source: int, answers: _Answers) -> list[OutputRow]:
        table = pa.Table.from_batches(list(self._segment(self._sources[source])), self._segment_schema)
        batch = table.take(pa.array(answers.place)).drop_columns([key.name for key in KEYS]).combine_chunks()
        results = [values for part in batch.to_batches() for values in to_rows(part)]
        inputs: list[dict[str, Any]] = [{} for _ in results]
        for shard in np.unique(answers.shard).tolist():
            here = np.flatnonzero(answers.shard == shard)
            values = self._input_rows(shard, answers.row[here])
            for entry in here.tolist():
                inputs[entry] = dict(values.get(int(answers.row[entry]), {}))
        return [OutputRow(0, own, result) for own, result in zip(inputs, results, strict=True)]

    def _input_rows(self, number: int, rows: npt.NDArray[np.int64]) -> Mapping[int, Mapping[str, Any]]:
        """Input columns by row; none where the file is not there as it was."""
        shard = self._shard(number)
        batches = [] if shard is None else list(iter_selected(shard, np.unique(rows)))
        return {batch.start + i: values for batch in batches for i, values in enumerate(to_rows(batch.table))}

    def _shard(self, number: int) -> Shard | None:
        if number not in self._shards:
            self._shards[number] = self._find_shard(number)
        return self._shards[number]

    def _find_shard(self, number: int) -> Shard | None:
        record = self.manifest.shards[number]
        try:
            (shard,) = discover(InputConfig(input=(record.uri,))).shards
        except BatchInferError:
            return None
        is_same = (shard.fingerprint, shard.num_rows) == (record.fingerprint, record.num_rows)
        return shard if is_same else None


def find_output(target: str) -> "tuple[JobManifest | None, UnfinishedOutput | None]":
    """The job that the output at `target` is of, where that is known, and its answers where it is unfinished."""
    try:
        layout = OutputLayout.of(target)
    except UsageError:  # a name that no output has, which others say better
        return None, None
    storage = open_storage(layout.root, layout.scratch)
    state, manifest = find_job(storage, layout)
    if manifest is None or state not in ("unfinished", "unanswered"):
        return manifest, None
    return manifest, UnfinishedOutput(storage, layout, manifest)


def _batch_keys(batch: pa.RecordBatch) -> tuple[Any, Any, Any, Any]:
    """(shard, row, sample, failed) of records of the journal or of a part's results."""
    failed = pc.equal(batch["finish_reason"], "error").to_numpy(zero_copy_only=False)
    if "shard" in batch.schema.names:
        keys = [batch[name].to_numpy().astype(np.int64) for name in ("shard", "row", "sample_index")]
    else:
        split = np.array([text.split("-") for text in batch["request_id"].to_pylist()], np.int64)
        keys = [split[:, column] for column in range(3)]
    return keys[0], keys[1], keys[2], failed
