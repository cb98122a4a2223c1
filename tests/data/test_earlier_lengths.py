"""Lengths that an earlier output tells, against its rows."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchinfer.data.earlier_lengths import EarlierLengths
from batchinfer.data.result_schema import result_schema
from batchinfer.data.row_map import RowMap
from batchinfer.errors import UsageError
from batchinfer.request import RequestId


def output(path: Path, rows: list[list[int | None]]) -> str:
    """rows: completion tokens of each sample of each row."""
    schema = result_schema("")
    samples = [(sample, tokens) for row in rows for sample, tokens in enumerate(row)]
    columns = {name: [None] * len(samples) for name in schema.names}
    columns["sample_index"] = [sample for sample, _ in samples]
    columns["completion_tokens"] = [tokens for _, tokens in samples]
    pq.write_table(pa.table(columns, schema=schema), path)
    return str(path)


def test_rows_are_told_by_their_place_in_the_job_and_repeat(tmp_path: Path) -> None:
    """Of two shards the job answers rows 1 and 3, and row 0; an error tells nothing."""
    selection = [np.array([1, 3]), np.array([0])]
    lengths = EarlierLengths(output(tmp_path / "out.parquet", [[5, 6], [None]]), RowMap([4, 2], selection))
    assert [lengths.of(RequestId(0, 1, sample)) for sample in range(4)] == [5, 6, 5, 6]
    assert lengths.of(RequestId(0, 3)) is None
    assert lengths.of(RequestId(1, 0, 1)) == 6


def test_an_output_that_lacks_a_part_is_refused(tmp_path: Path) -> None:
    for part in (0, 2):
        output(tmp_path / f"part-0000{part}.parquet", [[5], [6]])
    with pytest.raises(UsageError, match="part 1 is not there yet"):
        EarlierLengths(str(tmp_path), RowMap([6]))
    output(tmp_path / "part-00001.parquet", [[7], [8]])
    lengths = EarlierLengths(str(tmp_path), RowMap([6]))
    assert [lengths.of(RequestId(0, row)) for row in range(6)] == [5, 6, 7, 8, 5, 6]


def test_an_output_without_rows_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="has no rows"):
        EarlierLengths(output(tmp_path / "out.parquet", []), RowMap([1]))
