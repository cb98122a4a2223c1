"""A job without an engine, for the tests of the output: shards in memory, answers made up, the right output worked out
row by row in plain Python."""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from batchinfer.data.readers import RowBatch
from batchinfer.data.shards import Shard
from batchinfer.data.writer import FinishedOutput, OutputJob, OutputWriter, open_output
from batchinfer.request import RequestId, RequestTimes, Result

TIMES = RequestTimes(1.0, 2.0, 3.0, None, None, None, None, 4.0)


def make_shard(index: int, table: pa.Table, uri: str | None = None) -> Shard:
    content = hashlib.sha256(repr(table.to_pydict()).encode()).hexdigest()
    return Shard(index, uri or f"shard-{index}.parquet", "parquet", table.num_rows, content, table.schema)


def make_job(tables: Sequence[pa.Table], **changes: Any) -> OutputJob:
    def read_rows(shard: Shard, start: int, stop: int) -> Iterator[RowBatch]:
        for first in range(start, stop, 7):  # odd slices, that agree with no part
            batch = tables[shard.index].slice(first, min(7, stop - first)).combine_chunks().to_batches()[0]
            yield RowBatch(first, batch)

    options: dict[str, Any] = {
        "shards": [make_shard(i, table) for i, table in enumerate(tables)],
        "rows_per_part": 2,
        "model_fingerprint": "model-a",
        "options": {"temperature": 0.0, "rows_per_part": 2},
        "read_rows": read_rows,
    }
    return OutputJob(**{**options, **changes})


def answer(shard: int, row: int, sample: int = 0, text: str | None = None) -> Result:
    return Result(
        RequestId(shard, row, sample),
        "stop",
        text=f"answer {shard}/{row}/{sample}" if text is None else text,
        token_ids=[7] * (row % 3 + 1),
        prompt_tokens=5,
        cached_prompt_tokens=2,
        num_preemptions=0,
        times=TIMES,
    )


def open_writer(target: Path | str, job: OutputJob, overwrite: bool = False) -> OutputWriter:
    writer = open_output(str(target), job, overwrite)
    assert isinstance(writer, OutputWriter)
    return writer


def is_finished(target: Path | str, job: OutputJob) -> bool:
    """Whether opening the output again finds nothing to do."""
    output = open_output(str(target), job)
    if isinstance(output, OutputWriter):
        output.close()
    return isinstance(output, FinishedOutput)


def wanted_rows(writer: OutputWriter, job: OutputJob) -> list[tuple[int, int]]:
    return [
        (shard.index, row)
        for shard in job.shards
        for row, wanted in enumerate(writer.wanted(shard.index, 0, shard.num_rows).tolist())
        if wanted
    ]


def run_job(target: Path | str, job: OutputJob, texts: Mapping[tuple[int, int], str] | None = None) -> None:
    """Answer all rows that are wanted, the last ones first, and finish."""
    with open_writer(target, job) as writer:
        for shard, row in reversed(wanted_rows(writer, job)):
            writer.add([answer(shard, row, text=(texts or {}).get((shard, row)))])
        writer.finish({"rows": writer.num_rows})


def read_output(target: Path | str) -> list[dict[str, Any]]:
    """All rows of a finished output, read by pyarrow alone."""
    path = Path(target)
    files = [path] if path.is_file() else sorted(path.glob("part-*.parquet"))
    return [row for file in files for row in pq.ParquetFile(file).read().to_pylist()]


def prompts(*texts: str) -> pa.Table:
    return pa.table({"prompt": pa.array(texts, pa.string()), "id": pa.array(range(len(texts)), pa.int64())})
