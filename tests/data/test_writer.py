"""The output of a job: every row once, in order, with its input unchanged; what is refused and what is left alone."""

import datetime
import json
import random
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from output_jobs import answer, is_finished, make_job, open_writer, prompts, read_output, run_job, wanted_rows

from batchinfer.config import InputConfig
from batchinfer.data import parts, segments, writer
from batchinfer.data.read_output import iter_output
from batchinfer.data.readers import iter_rows
from batchinfer.data.result_schema import result_schema
from batchinfer.data.shards import discover
from batchinfer.data.writer import open_output
from batchinfer.errors import BatchInferError, ErrorCode, UsageError
from batchinfer.request import RequestId, Result

NAMES = [
    *("request_id", "sample_index", "completion", "finish_reason", "stop_reason", "error_code", "error_message"),
    *("prompt_tokens", "cached_prompt_tokens", "completion_tokens", "num_preemptions"),
    *("queue_ms", "prefill_ms", "ttft_ms", "tbt_mean_ms", "tbt_p50_ms", "tbt_p99_ms", "tbt_max_ms", "latency_ms"),
]


def completions(target: str) -> list[str]:
    return [row.result["completion"] for row in iter_output(target, [range(100)])]


def test_output_row_k_is_input_row_k(tmp_path: Path) -> None:
    """Cases 13, 14, 18, 20: answers by place whatever the order they come in, equal prompts and ids included."""
    table = pa.table({"custom_id": ["a", "a", "b", "a", "c"], "prompt": ["x", "y", "x", "x", "z"]})
    job = make_job([table, prompts("x", "x")])
    places = [(0, r) for r in range(5)] + [(1, r) for r in range(2)]
    for seed in range(3):
        order = random.Random(seed).sample(places, len(places))
        with open_writer(tmp_path / str(seed), job) as output:
            for place in order:
                output.add([answer(*place)])
            output.finish({})
        rows = read_output(tmp_path / str(seed))
        assert [row["completion"] for row in rows] == [f"answer {s}/{r}/0" for s, r in places]
        assert [row["custom_id"] for row in rows[:5]] == ["a", "a", "b", "a", "c"]
        sizes = {p.name: pq.read_metadata(p).num_rows for p in (tmp_path / str(seed)).glob("part-*")}
        assert sizes == {
            "part-00000.parquet": 2,
            "part-00001.parquet": 2,
            "part-00002.parquet": 1,
            "part-00003.parquet": 2,
        }


def test_each_part_has_the_fixed_columns_with_their_types_even_if_all_null(tmp_path: Path) -> None:
    """Case 8: one shard without errors, one with."""
    job = make_job([prompts("a"), prompts("b")], prefix="out_", token_ids=True, logprobs=True, prompt_logprobs=True)
    with open_writer(tmp_path / "out", job) as output:
        output.add([answer(0, 0)])
        output.add([Result(RequestId(1, 0), "error", error_code=ErrorCode.NUMERICAL, error_message="NaN")])
        output.finish({})
    schemas = [pq.read_schema(path) for path in sorted((tmp_path / "out").glob("part-*"))]
    assert schemas[0].equals(schemas[1])
    optional = ["completion_token_ids", "cumulative_logprob", "logprobs", "prompt_logprobs"]
    assert schemas[0].names == ["prompt", "id"] + ["out_" + name for name in [*NAMES, *optional]]
    assert schemas[0].field("out_error_message").type == pa.string()
    assert schemas[0].field("out_prompt_tokens").type == pa.int32()
    assert schemas[0].field("out_tbt_p99_ms").type == pa.float64()
    assert str(schemas[0].field("out_completion_token_ids").type) == "list<element: int32>"
    merged = pa.concat_tables([pq.read_table(path) for path in sorted((tmp_path / "out").glob("part-*"))])
    assert merged["out_error_code"].to_pylist() == [None, "numerical"]
    assert merged["out_latency_ms"].to_pylist() == [4.0, None]


def _odd_table() -> pa.Table:
    eastern = pa.timestamp("ns", "US/Eastern")
    columns = {
        "big": pa.array([9007199254740993, None], pa.int64()),
        "at": pa.array([1_500_000_000_123_456_789, None], eastern),
        "day": pa.array([datetime.date(2020, 2, 29), None], pa.date64()),
        "price": pa.array([Decimal("12.30"), None], pa.decimal128(9, 2)),
        "raw": pa.array([b"\x00\xff", None], pa.binary()),
        "kind": pa.array(["x", None]).dictionary_encode(),
        "messages": pa.array([[{"role": "user", "content": "hi\u2028there"}], None]),
        "score": pa.array([float("nan"), None], pa.float32()),
        "small": pa.array([0.1, None], pa.float32()),
        "pairs": pa.array([[("a", 1), ("b", 2)], None], pa.map_(pa.string(), pa.int64())),
        "extra": pa.array(['{"b": [1, 2.5, null], "a": 12345678901234567890}', None], pa.string()),
        "lasted": pa.array([1_500, None], pa.duration("ms")),
        "clock": pa.array([3_661_000_001, None], pa.time64("us")),
    }
    fields = [pa.field(name, array.type) for name, array in columns.items()]
    fields[10] = fields[10].with_metadata({"batchinfer": "json"})
    return pa.table(list(columns.values()), schema=pa.schema(fields, metadata={"made by": "a test"}))


@pytest.mark.parametrize("target", ["out", "out.parquet"])
def test_input_columns_come_back_unchanged(tmp_path: Path, target: str) -> None:
    table = _odd_table()
    run_job(tmp_path / target, make_job([table], metadata={"batchinfer.config": '{"seed": 0}'}))
    path = tmp_path / target if target.endswith("parquet") else tmp_path / target / "part-00000.parquet"
    metadata = pq.read_schema(path).metadata
    assert metadata[b"made by"] == b"a test"
    assert metadata[b"batchinfer.config"] == b'{"seed": 0}'
    (shard,) = discover(InputConfig(input=(str(path),))).shards
    back = pa.Table.from_batches(batch.table for batch in iter_rows(shard, 0, None, table.schema.names))
    assert back.schema.types == table.schema.types
    assert back.schema.field("extra").metadata == {b"batchinfer": b"json"}
    for name in set(table.schema.names) - {"score"}:
        assert back[name].to_pylist() == table[name].to_pylist() if name != "at" else back[name].equals(table[name])
    assert np.isnan(back["score"][0].as_py())


@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz", ".jsonl.zst"])
def test_json_lines_keep_each_value(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"out{suffix}"
    run_job(path, make_job([_odd_table()]))
    with pa.input_stream(path, compression={".gz": "gzip", ".zst": "zstd"}.get(path.suffix)) as stream:
        lines = stream.read().decode().splitlines()
    first, second = [json.loads(line) for line in lines]
    assert {name: first[name] for name in _odd_table().schema.names} == {
        "big": 9007199254740993,
        "at": "2017-07-13T22:40:00.123456789-04:00",
        "day": "2020-02-29",
        "price": "12.30",
        "raw": "AP8=",
        "kind": "x",
        "messages": [{"role": "user", "content": "hi\u2028there"}],
        "score": None,
        "small": 0.1,
        "pairs": [["a", 1], ["b", 2]],
        "extra": {"b": [1, 2.5, None], "a": 12345678901234567890},
        "lasted": "PT1.500S",
        "clock": "01:01:01.000001",
    }
    assert {second[name] for name in _odd_table().schema.names} == {None}
    assert (first["completion"], second["completion"]) == ("answer 0/0/0", "answer 0/1/0")
    assert is_finished(path, make_job([_odd_table()]))


def test_single_file_of_shards_with_different_columns(tmp_path: Path) -> None:
    tables = [pa.table({"prompt": ["a"], "x": pa.nulls(1)}), pa.table({"prompt": ["b"], "x": [5], "y": ["only here"]})]
    run_job(tmp_path / "out.parquet", make_job(tables))
    columns = ("prompt", "x", "y", "completion")
    assert [tuple(row[c] for c in columns) for row in read_output(tmp_path / "out.parquet")] == [
        ("a", None, None, "answer 0/0/0"),
        ("b", 5, "only here", "answer 1/0/0"),
    ]
    clash = make_job([pa.table({"prompt": ["a"]}), pa.table({"prompt": [1]})])
    with pytest.raises(UsageError, match=r"prompt.*give a directory"):
        open_output(str(tmp_path / "other.parquet"), clash)
    run_job(tmp_path / "other.jsonl.work.not" / "out", clash)  # a directory holds them


def test_several_samples_a_row(tmp_path: Path) -> None:
    job = make_job([prompts("a", "b", "c")], rows_per_part=3)
    with open_writer(tmp_path / "out", job) as output:
        output.expect(0, 0, 3)
        output.expect(0, 2, 2)
        output.add([answer(0, 2, 1), answer(0, 0, 2)])
        output.add([Result(RequestId(0, 1), "error", error_code=ErrorCode.EMPTY_PROMPT, error_message="empty")])
        output.flush()
        assert wanted_rows(output, job) == [(0, 0), (0, 2)]
    with open_writer(tmp_path / "out", job) as output:  # samples of incomplete rows are computed again
        assert output.is_resumed
        assert output.num_resumed == output.num_done == 1
        assert wanted_rows(output, job) == [(0, 0), (0, 2)]
        for row, count in ((0, 3), (2, 2)):
            output.expect(0, row, count)
            output.add([answer(0, row, k) for k in range(count)])
        output.finish({})
    rows = read_output(tmp_path / "out")
    assert [row["request_id"] for row in rows] == ["0-0-0", "0-0-1", "0-0-2", "0-1-0", "0-2-0", "0-2-1"]
    assert [row["prompt"] for row in rows] == ["a", "a", "a", "b", "c", "c"]
    assert [row["error_code"] for row in rows] == [None, None, None, "empty_prompt", None, None]


def test_a_sample_that_was_not_announced_is_refused(tmp_path: Path) -> None:
    with open_writer(tmp_path / "out", make_job([prompts("a")])) as output:
        with pytest.raises(ValueError, match="result 0-0-1: the row has 1 samples"):
            output.add([answer(0, 0, 1)])
        with pytest.raises(KeyError):
            output.add([answer(0, 1)])


def test_only_selected_rows_are_answered_and_written(tmp_path: Path) -> None:
    tables = [prompts(*"abcdefghij"), prompts("k", "l"), prompts("m")]
    selection = [np.array([1, 2, 5, 8, 9]), np.array([], np.int64), None]
    job = make_job(tables, selection=selection)
    with open_writer(tmp_path / "out", job) as output:
        assert output.num_rows == 6
        assert output.wanted(0, 2, 9).tolist() == [True, False, False, True, False, False, True]
        with pytest.raises(KeyError):
            output.add([answer(0, 3)])
        output.add([answer(0, 9), answer(0, 5), answer(0, 1), answer(0, 2)])
        output.drain()
        assert sorted(p.name for p in (tmp_path / "out").glob("part*")) == [
            "part-00000.parquet",  # rows 1 and 2
            "part-00002.parquet",  # row 9
        ]
        output.add([answer(2, 0), answer(0, 8)])
        output.finish({})
    assert [row["prompt"] for row in read_output(tmp_path / "out")] == ["b", "c", "f", "i", "j", "m"]
    assert [row["request_id"] for row in read_output(tmp_path / "out")][3:] == ["0-8-0", "0-9-0", "2-0-0"]


def test_resume_keeps_everything(tmp_path: Path) -> None:
    """Case 17: 200 rows, stopped after 120; the first 120 answers are those of the first run."""
    table = prompts(*["same"] * 200)
    job = make_job([table], rows_per_part=50)
    with open_writer(tmp_path / "out", job) as output:
        output.add([answer(0, row, text=f"first {row}") for row in range(120)])
    with open_writer(tmp_path / "out", job) as output:
        assert wanted_rows(output, job) == [(0, row) for row in range(120, 200)]
        assert (output.tally.rows, output.tally.prompt_tokens) == (120, 600)
        output.add([answer(0, row, text=f"second {row}") for row in range(110, 200)])  # ten answers come again
        output.drain()
        assert output.tally.completions == 200
        assert output.tally.finish_reasons == {"stop": 200}
        assert output.tally.completion_tokens == sum(row % 3 + 1 for row in range(200))
        output.finish({})
    expected = [f"first {row}" for row in range(120)] + [f"second {row}" for row in range(120, 200)]
    assert [row["completion"] for row in read_output(tmp_path / "out")] == expected


def test_finishing_too_early_is_refused(tmp_path: Path) -> None:
    with open_writer(tmp_path / "out", make_job([prompts("a", "b")])) as output:
        output.add([answer(0, 1)])
        with pytest.raises(BatchInferError, match="1 rows have no answer"):
            output.finish({})
    assert not (tmp_path / "out" / "_SUCCESS").exists()


def test_large_texts_make_several_row_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Case 7 at a smaller scale: no batch, slice or row group holds more than a few rows' text."""
    monkeypatch.setattr(segments, "_MAX_CHARACTERS", 3000)
    monkeypatch.setattr(parts, "_SLICE_BYTES", 4000)
    monkeypatch.setattr(parts, "ROW_GROUP_BYTES", 8000)
    job = make_job([prompts(*["long " * 100] * 40)], rows_per_part=40)
    with open_writer(tmp_path / "out", job) as output:
        for row in range(40):
            output.expect(0, row, 1 + row % 2)
        output.add([answer(0, r, k, text=chr(97 + r % 26) * 1000) for r in range(40) for k in range(1 + r % 2)])
        output.finish({})
    file = pq.ParquetFile(tmp_path / "out" / "part-00000.parquet")
    assert file.metadata.num_rows == 60
    assert max(file.metadata.row_group(i).num_rows for i in range(file.num_row_groups)) <= 8
    rows = file.read().to_pylist()
    assert [row["completion"] for row in rows] == [chr(97 + r % 26) * 1000 for r in range(40) for _ in range(1 + r % 2)]
    assert {row["prompt"] for row in rows} == {"long " * 100}


@pytest.mark.slow
def test_more_than_2_gib_of_text_in_a_part(tmp_path: Path) -> None:
    job = make_job([prompts(*["p"] * 2100)], rows_per_part=2100)
    with open_writer(tmp_path / "out", job) as output:
        for row in range(2100):
            output.add([answer(0, row, text=chr(97 + row % 26) * (1 << 20))])
        output.finish({})
    first_letters = []
    for batch in pq.ParquetFile(tmp_path / "out" / "part-00000.parquet").iter_batches(32, columns=["completion"]):
        texts = batch["completion"].to_pylist()
        assert {len(text) for text in texts} == {1 << 20}
        first_letters += [text[0] for text in texts]
    assert first_letters == [chr(97 + row % 26) for row in range(2100)]


def test_a_completion_that_no_column_can_hold_is_a_row_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "_MAX_CHARACTERS", 10)
    with open_writer(tmp_path / "out", make_job([prompts("a", "b")])) as output:
        output.add([answer(0, 0, text="x" * 11), answer(0, 1, text="x" * 10)])
        output.finish({})
        assert output.tally.errors == {"completion_too_large": 1}
    rows = read_output(tmp_path / "out")
    assert [(row["finish_reason"], row["completion"]) for row in rows] == [("error", None), ("stop", "x" * 10)]
    assert "11 characters" in rows[0]["error_message"]


def test_name_clash_is_found_before_any_work(tmp_path: Path) -> None:
    table = pa.table({"prompt": ["a"], "completion": ["mine"], "latency_ms": [1.0]})
    with pytest.raises(UsageError, match=r"'completion', 'latency_ms'.*--output-prefix"):
        open_output(str(tmp_path / "out"), make_job([table]))
    assert not (tmp_path / "out").exists()
    run_job(tmp_path / "out", make_job([table], prefix="x_"))
    assert read_output(tmp_path / "out")[0]["x_completion"] == "answer 0/0/0"
    with pytest.raises(UsageError, match="x_completion"):
        open_output(str(tmp_path / "b"), make_job([table.append_column("x_completion", [["c"]])], prefix="x_"))


@pytest.mark.parametrize("target", ["out", "out.parquet"])
def test_a_job_without_an_answer_binds_nothing(tmp_path: Path, target: str) -> None:
    """Its options may not have fitted the model: with others the command just runs. One answer is worth a refusal."""
    first = make_job([prompts("a", "b", "c")], options={"max_model_len": 10**9})
    second = make_job([prompts("a", "b", "c")], options={"max_model_len": 100})
    open_writer(tmp_path / target, first).close()
    with open_writer(tmp_path / target, second) as output:
        assert not output.is_resumed
        output.add([answer(0, 1)])
    with pytest.raises(UsageError, match="--max-model-len was 100, now 1000000000"):
        open_output(str(tmp_path / target), first)
    with open_writer(tmp_path / target, second) as output:
        output.add([answer(0, 2), answer(0, 0)])
        output.drain()  # the first part is built, and its rows leave the journal
        assert output.num_resumed == 1
    with pytest.raises(UsageError, match="--max-model-len was 100, now 1000000000"):
        open_output(str(tmp_path / target), first)


@pytest.mark.parametrize("target", ["out", "out.parquet", "out.jsonl"])
def test_finished_job_does_nothing_and_another_is_refused(tmp_path: Path, target: str) -> None:
    job = make_job([prompts("a", "b")])
    run_job(tmp_path / target, job)
    before = {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*")}
    assert is_finished(tmp_path / target, job)
    changed = make_job([prompts("a", "b")], options={"temperature": 0.7, "rows_per_part": 2})
    with pytest.raises(UsageError, match=r"temperature was 0\.0, now 0\.7.*--overwrite"):
        open_output(str(tmp_path / target), changed)
    assert {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*")} == before
    page, plots = (
        ("out/_report.html", "out/_report") if target == "out" else (f"{target}.report.html", f"{target}.report")
    )
    (tmp_path / page).write_text("of the first job")
    (tmp_path / plots).mkdir()
    (tmp_path / plots / "batch.png").write_bytes(b"")
    with open_writer(tmp_path / target, changed, overwrite=True) as output:
        assert not (tmp_path / page).exists()
        assert not (tmp_path / plots).exists()
        output.add([answer(0, 0, text="new"), answer(0, 1, text="new")])
        output.finish({})
    assert completions(str(tmp_path / target)) == ["new", "new"]


@pytest.mark.parametrize("target", ["out", "out.parquet"])
def test_unfinished_job_refuses_a_changed_input(tmp_path: Path, target: str) -> None:
    """Case 15: a row inserted at the top, shards in another order."""
    tables = [prompts("a", "b"), prompts("c")]
    with open_writer(tmp_path / target, make_job(tables)) as output:
        output.add([answer(0, 0)])
    with pytest.raises(UsageError, match=r"shard 0 \(shard-0.parquet\) changed: 2 rows, now 3"):
        open_output(str(tmp_path / target), make_job([prompts("new", "a", "b"), tables[1]]))
    with pytest.raises(UsageError, match="order of the shards changed"):
        open_output(str(tmp_path / target), make_job(tables[::-1]))
    with pytest.raises(UsageError, match="the model changed"):
        open_output(str(tmp_path / target), make_job(tables, model_fingerprint="model-b"))
    run_job(tmp_path / target, make_job(tables))  # the old job still carries on
    assert len(read_output(tmp_path / target)) == 3


def test_overwrite_clears_only_what_batchinfer_made(tmp_path: Path) -> None:
    """Case 12."""
    run_job(tmp_path / "out", make_job([prompts(*"abcdefgh")]))
    (tmp_path / "out" / "notes.txt").write_text("mine")
    (tmp_path / "out" / "part-of-me.parquet").write_bytes(b"mine")
    job = make_job([prompts("z")])
    open_writer(tmp_path / "out", job, overwrite=True).close()
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["_work", "notes.txt", "part-of-me.parquet"]
    run_job(tmp_path / "out", job)
    assert [row["prompt"] for row in pq.read_table(tmp_path / "out" / "part-00000.parquet").to_pylist()] == ["z"]


@pytest.mark.parametrize("overwrite", [False, True])
def test_foreign_files_are_refused(tmp_path: Path, overwrite: bool) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "part-00000.parquet").write_bytes(b"another tool's")
    (tmp_path / "data.parquet").write_bytes(b"mine")
    (tmp_path / "plain").write_bytes(b"mine")
    (tmp_path / "dir.jsonl").mkdir()
    for target in ("folder", "data.parquet", "plain", "dir.jsonl"):
        with pytest.raises(UsageError, match="batchinfer did not make it"):
            open_output(str(tmp_path / target), make_job([prompts("a")]), overwrite)
    assert (tmp_path / "folder" / "part-00000.parquet").read_bytes() == b"another tool's"
    with pytest.raises(UsageError, match=r"a single file is \.parquet or \.jsonl"):
        open_output(str(tmp_path / "out.csv"), make_job([prompts("a")]))


def test_foreign_part_in_an_own_directory_is_not_written_over(tmp_path: Path) -> None:
    job = make_job([prompts("a", "b", "c")])
    open_writer(tmp_path / "out", job).close()
    pq.write_table(prompts("mine"), tmp_path / "out" / "part-00001.parquet")
    with pytest.raises(UsageError, match=r"part-00001.parquet is damaged or batchinfer did not make it"):
        open_output(str(tmp_path / "out"), job)


def test_missing_part_of_a_finished_output_is_noticed(tmp_path: Path) -> None:
    job = make_job([prompts("a", "b", "c")])
    run_job(tmp_path / "out", job)
    (tmp_path / "out" / "part-00001.parquet").unlink()
    with pytest.raises(UsageError, match=r"missing.*--overwrite"):
        open_output(str(tmp_path / "out"), job)


def test_two_writers_at_once_are_refused(tmp_path: Path) -> None:
    job = make_job([prompts("a")])
    with open_writer(tmp_path / "out", job), pytest.raises(UsageError, match=r"in use by process \d+ on "):
        open_output(str(tmp_path / "out"), job)
    run_job(tmp_path / "out", job)


def test_stale_temporary_files_go_at_restart(tmp_path: Path) -> None:
    """Case 11."""
    job = make_job([prompts("a")])
    open_writer(tmp_path / "out", job).close()
    scratch = tmp_path / "out" / "_work" / "tmp"
    scratch.mkdir(exist_ok=True)
    (scratch / "part-00000.parquet.1-0.tmp").write_bytes(b"PAR1 half")
    open_writer(tmp_path / "out", job).close()
    assert not list(scratch.glob("*part*"))


def test_manifest_and_stats(tmp_path: Path) -> None:
    job = make_job([prompts("a", "b", "c")])
    with open_writer(tmp_path / "out", job) as output:
        output.add([answer(0, row) for row in range(3)])
        output.finish({"rows": 3})
    manifest = json.loads((tmp_path / "out" / "_manifest.json").read_text())
    sizes = [(tmp_path / "out" / f"part-0000{i}.parquet").stat().st_size for i in range(2)]
    assert [(p["name"], p["shard"], p["num_rows"], p["num_bytes"]) for p in manifest["parts"]] == [
        ("part-00000.parquet", 0, 2, sizes[0]),
        ("part-00001.parquet", 0, 1, sizes[1]),
    ]
    assert json.loads((tmp_path / "out" / "_stats.json").read_text()) == {"rows": 3}
    assert not (tmp_path / "out" / "_work").exists()


def test_a_failed_write_ends_the_job_with_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output = open_writer(tmp_path / "out", make_job([prompts("a", "b")]))
    journal_folder = next(iter((tmp_path / "out" / "_work").glob("job.json"))).parent
    (journal_folder / f"journal-{output._claim.manifest.job_id}").write_text("in the way")
    output.add([answer(0, 0)])
    with pytest.raises(
        BatchInferError, match=f"cannot write {tmp_path}.*choose another|run the same command"
    ) as caught:
        output.flush()
    assert "\n" not in str(caught.value)
    with pytest.raises(BatchInferError):
        output.poll()
    output.close()


def test_output_on_an_object_store() -> None:
    job = make_job([prompts("a", "b", "c"), prompts("d")])
    target = "memory://bucket/out"
    with open_writer(target, job) as output:
        output.add([answer(0, 2), answer(0, 1)])
    with open_writer(target, job) as output:
        assert wanted_rows(output, job) == [(0, 0), (1, 0)]
        output.add([answer(1, 0), answer(0, 0)])
        output.finish({})
    assert is_finished(target, job)
    assert completions(target) == [f"answer {p}/0" for p in ("0/0", "0/1", "0/2", "1/0")]
    with pytest.raises(UsageError, match="shards, was 2"):
        open_output(target, make_job([prompts("a", "b", "c")]))


def test_result_schema_names() -> None:
    assert result_schema().names == NAMES


def _rss_mib() -> float:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmRSS"))
    return int(line.split()[1]) / 1024


@pytest.mark.slow
def test_memory_stays_flat_over_many_rows(tmp_path: Path) -> None:
    """Case 59: once the buffers and caches of bounded size are full, memory does not grow."""
    num_rows = 300_000
    job: Any = make_job([prompts(*["p"] * num_rows)], rows_per_part=10_000)
    with open_writer(tmp_path / "out", job) as output:
        for start in range(0, num_rows, 100):
            output.add([answer(0, row, text="x" * 200) for row in range(start, start + 100)])
            if start == num_rows // 3:
                output.drain()
                before = _rss_mib()
        output.drain()
        assert _rss_mib() - before < 64  # 200,000 answers held in memory would take over 200 MiB
        output.finish({})
