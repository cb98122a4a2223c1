"""Which rows --limit and --sample choose."""

from collections import Counter

import numpy as np
import pyarrow as pa
import pytest

from batchinfer.data import selection
from batchinfer.data.selection import draw, select_rows
from batchinfer.data.shards import Shard, ShardSet


def shard_set(*counts: int) -> ShardSet:
    schema = pa.schema([("a", pa.int64())])
    return ShardSet(tuple(Shard(i, f"s{i}", "parquet", n, "", schema) for i, n in enumerate(counts)), ())


def as_lists(chosen: tuple[selection.Selection, ...]) -> list[list[int] | None]:
    return [None if rows is None else rows.tolist() for rows in chosen]


def test_limit_takes_the_first_rows_of_the_input() -> None:
    shards = shard_set(3, 2, 4)
    assert as_lists(select_rows(shards, 2, None, 0)) == [[0, 1], [], []]
    assert as_lists(select_rows(shards, 3, None, 0)) == [None, [], []]
    assert as_lists(select_rows(shards, 6, None, 0)) == [None, None, [0]]
    assert as_lists(select_rows(shards, 9, None, 0)) == [None] * 3
    assert as_lists(select_rows(shards, 99, None, 0)) == [None] * 3
    assert as_lists(select_rows(shards, None, None, 0)) == [None] * 3


def test_sample_is_sorted_distinct_within_the_shards_and_repeatable() -> None:
    shards = shard_set(50, 1, 70)
    chosen = select_rows(shards, None, 40, 7)
    again = select_rows(shards, None, 40, 7)
    places = [(i, int(row)) for i, rows in enumerate(chosen) for row in (range(1) if rows is None else rows)]
    assert len(set(places)) == 40
    assert places == sorted(places)
    assert all(0 <= row < (50, 1, 70)[i] for i, row in places)
    assert as_lists(chosen) == as_lists(again)
    assert as_lists(chosen) != as_lists(select_rows(shards, None, 40, 8))
    assert as_lists(select_rows(shards, None, 121, 7)) == [None] * 3


def test_a_larger_sample_contains_the_smaller() -> None:
    small, large = set(draw(10_000, 10, 3).tolist()), set(draw(10_000, 100, 3).tolist())
    assert small < large


def test_chunks_do_not_change_the_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = draw(5000, 300, 11)
    monkeypatch.setattr(selection, "_CHUNK_ROWS", 64)
    assert np.array_equal(draw(5000, 300, 11), whole)


def test_every_row_is_as_likely_and_neighbouring_seeds_are_unrelated() -> None:
    """4,000 draws of 5 out of 20: each row is expected 1,000 times, with a standard deviation of 27."""
    counts: Counter[int] = Counter()
    for seed in range(4000):
        counts.update(draw(20, 5, seed).tolist())
    assert sum(counts.values()) == 20_000
    assert all(abs(counts[row] - 1000) < 5 * 27.4 for row in range(20))
    overlaps = [len(set(draw(1000, 100, s).tolist()) & set(draw(1000, 100, s + 1).tolist())) for s in range(50)]
    assert abs(np.mean(overlaps) - 10) < 2  # 100 * 100 / 1000


def test_splitmix_values_are_those_of_the_paper() -> None:
    """The first outputs of the reference generator for state 1234567."""
    base = np.array([1234567], np.uint64)
    states = base + (np.arange(2, dtype=np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    assert selection._mix(states).tolist() == [6457827717110365317, 3203168211198807973]
