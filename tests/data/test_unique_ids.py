"""Repeated values of an id column."""

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchinfer.config import InputConfig
from batchinfer.data import unique_ids
from batchinfer.data.shards import ShardSet, discover
from batchinfer.data.unique_ids import DuplicateId, Place, find_duplicate_ids
from batchinfer.errors import UsageError


def found(*paths: Path) -> ShardSet:
    return discover(InputConfig(input=tuple(str(path) for path in paths)))


def jsonl(path: Path, *ids: object) -> Path:
    path.write_text("".join(json.dumps({"custom_id": value, "prompt": "p"}) + "\n" for value in ids))
    return path


def test_distinct_ids_have_no_duplicates(tmp_path: Path) -> None:
    pq.write_table(pa.table({"custom_id": [f"r{i}" for i in range(20_000)]}), tmp_path / "a.parquet")
    assert find_duplicate_ids(found(tmp_path / "a.parquet"), "custom_id") == []


def test_repeats_are_found_within_and_across_shards_in_input_order(tmp_path: Path) -> None:
    first = jsonl(tmp_path / "a.jsonl", "a", "b", "a", "c")
    second = jsonl(tmp_path / "b.jsonl", "d", "c", "b", "a")
    assert find_duplicate_ids(found(first, second), "custom_id") == [
        DuplicateId("a", Place(0, 0), Place(0, 2)),
        DuplicateId("c", Place(0, 3), Place(1, 1)),
        DuplicateId("b", Place(0, 1), Place(1, 2)),
    ]
    assert len(find_duplicate_ids(found(first, second), "custom_id", limit=1)) == 1


def test_nulls_and_unreadable_lines_are_no_ids(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "a.jsonl", None, "x", None)
    path.write_text(path.read_text() + "broken\nbroken\n")
    assert find_duplicate_ids(found(path), "custom_id") == []


def test_other_types_and_equal_hashes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pq.write_table(pa.table({"n": [5, -1, -2, 5], "l": [[1], [2], [3], [1]]}), tmp_path / "a.parquet")
    shards = found(tmp_path / "a.parquet")
    monkeypatch.setattr(unique_ids, "hash", lambda value: 7, raising=False)  # every value collides
    assert find_duplicate_ids(shards, "n") == [DuplicateId(5, Place(0, 0), Place(0, 3))]
    assert find_duplicate_ids(shards, "l") == [DuplicateId([1], Place(0, 0), Place(0, 3))]


def test_a_missing_column_is_named(tmp_path: Path) -> None:
    shards = found(jsonl(tmp_path / "a.jsonl", "a"))
    with pytest.raises(UsageError, match=r"a\.jsonl: there is no column 'id'; the columns are custom_id, prompt"):
        find_duplicate_ids(shards, "id")
