"""What is gathered from an output's rows in one pass, against the same worked out from all rows at once."""

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from finished_jobs import make_rows, make_stats, write_job

from batchinfer.data.read_output import iter_results
from batchinfer.errors import UsageError
from batchinfer.report.row_figures import COLUMNS, NUM_EXAMPLES, NUM_SLOWEST, RowFigures, collect


def random_rows(seed: int) -> list[dict]:
    rng = np.random.default_rng(seed)
    rows = make_rows(int(rng.integers(0, 200)), 0)
    for row in rows:
        row["latency_ms"] = float(rng.integers(0, 50))  # with ties
        row["ttft_ms"] = float(rng.exponential(100))
        if rng.random() < 0.2:
            code = str(rng.choice(["null_prompt", "bad_prompt", "numerical"], p=[0.8, 0.15, 0.05]))
            row |= {"finish_reason": "error", "error_code": code, "error_message": "no", "latency_ms": None}
            row |= {"ttft_ms": None}
    return rows


@pytest.mark.parametrize("seed", range(10))
def test_one_pass_equals_all_rows_at_once(seed, tmp_path):
    rows = random_rows(seed)
    target = write_job(tmp_path, rows, make_stats(), "x.parquet")
    table = pa.Table.from_batches(iter_results(str(target), COLUMNS)) if rows else None
    figures = RowFigures()
    for start in range(0, len(rows), 9):
        figures.add(table.slice(start, 9).combine_chunks().to_batches()[0])
    assert figures.num_rows == len(rows)
    numbered = list(enumerate(rows))
    answered = [(number, row) for number, row in numbered if row["finish_reason"] != "error"]
    expected = sorted(answered, key=lambda entry: (-entry[1]["latency_ms"], entry[0]))[:NUM_SLOWEST]
    assert [row["number"] for row in figures.slowest] == [number for number, _ in expected]
    assert [row["input_id"] for row in figures.slowest] == [row["id"] for _, row in expected]
    failed = [(number, row["error_code"]) for number, row in numbered if row["finish_reason"] == "error"]
    for code in {code for _, code in failed}:
        own = [number for number, other in failed if other == code]
        assert figures.error_counts[code] == len(own)
        assert [row["number"] for row in figures.error_examples[code]] == own[:NUM_EXAMPLES]
    assert figures.error_counts.keys() == {code for _, code in failed}
    if answered:
        times = [row["ttft_ms"] for _, row in answered]
        assert figures.distributions["ttft_ms"].percentile(0.9) == pytest.approx(np.percentile(times, 90))
        assert figures.distributions["latency_ms"].count == len(answered)


@pytest.mark.parametrize("name", ["x.parquet", "x.jsonl", "x.completions"])
@pytest.mark.parametrize("prefix", ["", "out_"])
def test_every_kind_of_output_gives_the_same(name, prefix, tmp_path):
    target = write_job(tmp_path, make_rows(prefix=prefix), make_stats(), name, prefix)
    figures = collect(iter_results(str(target), COLUMNS))
    assert figures.num_rows == 12
    assert [row["input_id"] for row in figures.slowest] == [f"row-{number}" for number in range(9, -1, -1)]
    assert [row["error_message"] for row in figures.error_examples["null_prompt"]] == [
        "row 10 is null",
        "row 11 is null",
    ]
    assert figures.distributions["queue_ms"].summary()["max"] == 2500


def test_ids_of_any_type_and_none_at_all(tmp_path):
    rows = make_rows(3, 0)
    for row, own_id in zip(rows, (7, {"a": [1]}, None), strict=True):
        row["custom_id"] = own_id
        del row["id"]
    target = tmp_path / "x.jsonl"
    target.write_text("".join(json.dumps({"custom_id": row.pop("custom_id"), **row}) + "\n" for row in rows))
    figures = collect(iter_results(str(target), COLUMNS))
    assert [row["input_id"] for row in figures.slowest] == [None, '{"a": [1]}', "7"]
    table = pa.Table.from_pylist(make_rows(3, 0)).drop_columns(["id"])
    pq.write_table(table, tmp_path / "y.parquet")
    assert {row["input_id"] for row in collect(iter_results(str(tmp_path / "y.parquet"), COLUMNS)).slowest} == {None}


def test_other_files_are_refused(tmp_path):
    (tmp_path / "x.jsonl").write_text('{"id": 1}\n')
    with pytest.raises(UsageError, match="not an output of batchinfer"):
        collect(iter_results(str(tmp_path / "x.jsonl"), COLUMNS))
