"""Reads an output back in its row order. Used by summaries and tests."""

import contextlib
from collections.abc import Iterator, Sequence

import pyarrow as pa

from batchinfer.config import InputConfig
from batchinfer.data.output_layout import PART_NAME, OutputLayout
from batchinfer.data.readers import iter_rows
from batchinfer.data.shards import discover
from batchinfer.data.storage import open_storage
from batchinfer.errors import UsageError


def iter_output(target: str, columns: Sequence[str] | None = None) -> Iterator[pa.RecordBatch]:
    """The rows of a finished output, or of the parts that an unfinished directory holds so far, in slices of bounded
    size. columns: None for all. UsageError where there is nothing to read."""
    for path in output_files(target):
        for shard in discover(InputConfig(input=(path,))).shards:
            with contextlib.closing(iter_rows(shard, 0, None, columns)) as batches:  # type: ignore[type-var]
                for batch in batches:
                    yield batch.table


def output_files(target: str) -> list[str]:
    """Full names of the finished files of an output, in order."""
    layout = OutputLayout.of(target)
    storage = open_storage(layout.root, layout.scratch)
    names = [layout.file] if layout.file else [n for n in storage.list() if PART_NAME.fullmatch(n)]
    paths = [storage.path(name) for name in names if storage.exists(name)]
    if not paths:
        raise UsageError(f"{target}: no finished part there yet")
    return paths
