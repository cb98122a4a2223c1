"""The journal: rows come back exactly, from whatever segments a crash leaves; the number of segments stays small."""

import random
import threading
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from output_jobs import answer

from batchinfer.data import journal as journal_module
from batchinfer.data.background import Flusher
from batchinfer.data.journal import Journal, expand_records
from batchinfer.data.result_schema import record_bytes, result_schema, results_to_batch
from batchinfer.data.row_map import PartMap, RowMap
from batchinfer.data.segments import byte_slices
from batchinfer.data.storage import Storage, open_storage
from batchinfer.errors import ErrorCode
from batchinfer.request import PromptLogprobs, RequestId, Result, TokenLogprob

ROWS = RowMap([50, 30])


@pytest.fixture
def storage(tmp_path: Path) -> Storage:
    return open_storage(str(tmp_path), "tmp")


def _open(storage: Storage, writer_id: str = "aa", rows: RowMap = ROWS) -> Journal:
    journal = Journal(storage, "journal", writer_id, result_schema(), rows)
    journal.recover()
    return journal


def _texts(journal: Journal, positions: list[int], samples: list[int] | None = None) -> list[str]:
    table = journal.gather(np.array(positions), np.array(samples or [0] * len(positions)))
    return table["completion"].to_pylist()


def test_rows_come_back_in_the_order_asked(storage: Storage) -> None:
    journal = _open(storage)
    places = [(0, row) for row in range(50)] + [(1, row) for row in range(30)]
    order = random.Random(1).sample(places, 60)
    for start in range(0, 60, 7):
        journal.append([(answer(*place),) for place in order[start : start + 7]])
    for opened in (journal, _open(storage)):
        positions = sorted(places.index(place) for place in order)
        assert np.flatnonzero(opened.mask(0, 80)).tolist() == positions
        assert _texts(opened, positions) == ["answer {}/{}/0".format(*places[p]) for p in positions]
        backwards = positions[::-1]
        assert _texts(opened, backwards) == ["answer {}/{}/0".format(*places[p]) for p in backwards]
        assert opened.tally.rows == 60


def test_the_first_answer_stays_also_between_writers(storage: Storage) -> None:
    first, other = _open(storage), _open(storage, "bb")
    first.append([(answer(0, 1, text="first"),), (answer(0, 1, text="again"),), (answer(0, 2),)])
    assert first.append([(answer(0, 1, text="late"),)]).tolist() == []
    other.append([(answer(0, 1, text="other"),), (answer(0, 3),)])  # same number, other writer
    merged = _open(storage, "cc")
    assert np.flatnonzero(merged.mask(0, 80)).tolist() == [1, 2, 3]
    assert _texts(merged, [1]) == ["first"]
    assert merged.tally.rows == 3


def test_samples_of_a_row_stay_together(storage: Storage) -> None:
    journal = _open(storage)
    journal.append([(answer(0, 5, 0), answer(0, 5, 1), answer(0, 5, 2)), (answer(1, 0),)])
    journal = _open(storage)
    counts, nbytes = journal.layout(5, 6)
    assert counts.tolist() == [3]
    assert nbytes[0] >= len("answer 0/5/0")
    assert _texts(journal, [5, 50, 5, 5], [2, 0, 0, 1]) == [f"answer {p}" for p in ("0/5/2", "1/0/0", "0/5/0", "0/5/1")]


def test_torn_segments_are_ignored_and_removed(storage: Storage, tmp_path: Path) -> None:
    journal = _open(storage)
    for row in range(4):
        journal.append([(answer(0, row),)])
    names = sorted((tmp_path / "journal").iterdir())
    names[1].write_bytes(names[1].read_bytes()[:-100])
    names[2].write_bytes(b"")
    recovered = _open(storage)
    assert np.flatnonzero(recovered.mask(0, 80)).tolist() == [0, 3]
    assert sorted((tmp_path / "journal").iterdir()) == [names[0], names[3]]
    recovered.append([(answer(0, 9),)])
    assert len(list((tmp_path / "journal").iterdir())) == 3  # no number is used twice


def test_segments_are_deleted_with_the_last_row_that_needs_them(storage: Storage, tmp_path: Path) -> None:
    journal = _open(storage)
    journal.append([(answer(0, 0),), (answer(0, 1),)])
    journal.append([(answer(0, 2),), (answer(0, 3),)])
    journal.release(0, 1)
    assert journal.num_segments == 2
    journal.release(1, 2)
    assert journal.num_segments == 1
    assert len(list((tmp_path / "journal").iterdir())) == 1
    assert journal.has(0)  # in a part now, and so not to be computed again


def test_closed_rows_of_a_crash_before_the_deletion_are_not_live(storage: Storage) -> None:
    _open(storage).append([(answer(0, 0),), (answer(0, 1),)])
    recovered = Journal(storage, "journal", "bb", result_schema(), ROWS)
    recovered.recover(closed=[(0, 2)])
    assert recovered.num_segments == 0
    assert storage.list("journal") == []
    assert recovered.mask(0, 3).tolist() == [True, True, False]


def test_the_number_of_segments_stays_small(storage: Storage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal_module, "_FAN_OUT", 4)
    rows = RowMap([120])
    journal = _open(storage, rows=rows)
    order = random.Random(2).sample(range(120), 120)
    for row in order:
        journal.append([(answer(0, row),)])
        if journal.needs_compaction():
            journal.compact()
        assert journal.num_segments <= 4 * 4  # 4 of each of log4(120) levels
    assert len(list((tmp_path / "journal").iterdir())) == journal.num_segments
    expected = [f"answer 0/{row}/0" for row in range(120)]
    assert _texts(journal, list(range(120))) == expected
    assert _texts(_open(storage, rows=rows), list(range(120))) == expected


def test_rows_left_twice_by_a_crash_in_compaction_are_harmless(
    storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal_module, "_FAN_OUT", 3)
    journal = _open(storage)
    for row in range(3):
        journal.append([(answer(0, row),)])
    monkeypatch.setattr(storage, "delete", lambda name: None)
    journal.compact()
    monkeypatch.undo()
    assert len(storage.list("journal")) == 4
    recovered = _open(storage)
    assert _texts(recovered, [0, 1, 2]) == [f"answer 0/{row}/0" for row in range(3)]
    assert recovered.tally.rows == 3
    assert len(storage.list("journal")) == 3  # the merged one held nothing new


def test_all_fields_of_a_result_survive() -> None:
    logprobs = [TokenLogprob(7, -0.5, ((7, -0.5), (9, -1.25))), TokenLogprob(8, -2.0)]
    scores = PromptLogprobs(-3.5, 2, np.array([-1.5, -2.0], np.float32))
    full = Result(RequestId(1, 2, 3), "stop", "text", [7, 8], "\n", None, None, 5, 4, 1, None, -2.5, logprobs, scores)
    bad = Result(RequestId(0, 0), "error", error_code=ErrorCode.NULL_PROMPT, error_message="null")
    schema = result_schema(token_ids=True, logprobs=True, prompt_logprobs=True)
    first, second = results_to_batch([full, bad], schema).to_pylist()
    assert {k: v for k, v in first.items() if v is not None} == {
        "request_id": "1-2-3",
        "sample_index": 3,
        "completion": "text",
        "finish_reason": "stop",
        "stop_reason": "\n",
        "prompt_tokens": 5,
        "cached_prompt_tokens": 4,
        "completion_tokens": 2,
        "num_preemptions": 1,
        "completion_token_ids": [7, 8],
        "cumulative_logprob": -2.5,
        "logprobs": [
            {
                "token_id": 7,
                "logprob": -0.5,
                "top": [{"token_id": 7, "logprob": -0.5}, {"token_id": 9, "logprob": -1.25}],
            },
            {"token_id": 8, "logprob": -2.0, "top": []},
        ],
        "prompt_logprobs": {"sum": -3.5, "count": 2, "per_token": [-1.5, -2.0]},
    }
    assert {k: v for k, v in second.items() if v is not None} == {
        "request_id": "0-0-0",
        "sample_index": 0,
        "finish_reason": "error",
        "error_code": "null_prompt",
        "error_message": "null",
    }


def test_record_bytes_count_the_text_exactly() -> None:
    batch = results_to_batch([answer(0, 0, text="é" * 100), answer(0, 1, text="")], result_schema())
    sizes = record_bytes(batch)
    assert sizes[0] - sizes[1] == 200


@given(st.lists(st.integers(0, 50), max_size=40), st.integers(1, 100), st.integers(1, 10))
def test_byte_slices_cover_all_within_the_limits(sizes: list[int], max_bytes: int, max_records: int) -> None:
    slices = list(byte_slices(np.array(sizes, np.int64), max_bytes, max_records))
    assert [i for piece in slices for i in range(piece.start, piece.stop)] == list(range(len(sizes)))
    for piece in slices:
        assert piece.stop - piece.start == 1 or sum(sizes[piece]) <= max_bytes
        assert 1 <= piece.stop - piece.start <= max_records


@given(st.lists(st.integers(1, 4), max_size=10))
def test_expand_records(counts: list[int]) -> None:
    rows, samples = expand_records(np.array(counts, np.int32))
    expected = [(row, sample) for row, count in enumerate(counts) for sample in range(count)]
    assert list(zip(rows.tolist(), samples.tolist(), strict=True)) == expected


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 9), st.none() | st.sets(st.integers(0, 8))), min_size=1, max_size=4),
    st.integers(1, 4),
)
def test_row_map_and_parts_against_a_plain_list(shards: list[tuple[int, set[int] | None]], rows_per_part: int) -> None:
    chosen = [range(n) if s is None else sorted(r for r in s if r < n) for n, s in shards]
    selection = [
        None if s is None else np.array(list(rows), np.int64) for (_, s), rows in zip(shards, chosen, strict=True)
    ]
    row_map = RowMap([n for n, _ in shards], selection)
    places = [(shard, row) for shard, rows in enumerate(chosen) for row in rows]
    assert row_map.num_rows == len(places)
    for shard, (num_rows, _) in enumerate(shards):
        for row in range(-1, num_rows + 1):
            if (shard, row) in places:
                assert row_map.position(shard, row) == places.index((shard, row))
            else:
                with pytest.raises(KeyError):
                    row_map.position(shard, row)
    arrays = [np.array([place[i] for place in places], np.int64) for i in (0, 1)]
    assert row_map.positions(*arrays).tolist() == list(range(len(places)))
    part_map = PartMap(row_map, rows_per_part)
    covered = [(part.shard, row) for part in part_map.parts for row in row_map.rows(part.shard, part.start, part.stop)]
    assert covered == places
    for part in part_map.parts:
        assert 1 <= part.num_rows <= rows_per_part
    expected = [part.num_rows for part in part_map.parts]
    assert part_map.count_by_part(np.arange(len(places))).tolist() == expected


def test_flusher_keeps_its_time_and_its_order() -> None:
    written: list[list[int]] = []
    done = threading.Event()

    def write(items: list[int]) -> None:
        written.append(list(items))
        done.set()

    flusher: Flusher[int] = Flusher("test", write, interval_s=0.05)
    flusher.add([1, 2], 10)
    flusher.add([3], 10)
    assert done.wait(2.0)
    assert [item for items in written for item in items] == [1, 2, 3]
    flusher.add([4], 10)
    flusher.flush()
    flusher.add([5], 10)
    flusher.stop()
    assert [item for items in written for item in items] == [1, 2, 3, 4, 5]


def test_flusher_hands_its_failure_to_the_caller() -> None:
    def fail(items: list[int]) -> None:
        raise pa.ArrowInvalid("broken")

    flusher: Flusher[int] = Flusher("test", fail, interval_s=0.01)
    flusher.add([1], 1)
    with pytest.raises(pa.ArrowInvalid):
        flusher.flush()
    with pytest.raises(pa.ArrowInvalid):
        flusher.add([2], 1)
    flusher.stop()
