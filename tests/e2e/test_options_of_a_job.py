"""Options that change which rows are read, what they become and how they are written, over whole jobs."""

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from small_tokenizers import BOS, EOS, SHIFT
from tiny_jobs import call, read_rows, write_jsonl

ROWS = [{"id": i, "name": f"n{i}", "prompt": f"row {i}"} for i in range(30)]


@pytest.fixture
def job(tmp_path: Path) -> list[object]:
    path = write_jsonl(tmp_path / "in.jsonl", ROWS)
    return ["--input", path, "--output", tmp_path / "out", "--max-tokens", 3, "--ignore-eos", "--overwrite"]


def test_limit_and_sample(tmp_path: Path, tiny_model: Path, job: list[object]) -> None:
    assert call(tiny_model, *job, "--limit", 4) == 0
    limited = read_rows(tmp_path / "out")
    assert [row["id"] for row in limited] == [0, 1, 2, 3]
    samples = []
    for seed in (1, 1, 2):
        assert call(tiny_model, *job, "--sample", 6, "--seed", seed) == 0
        samples.append([row["id"] for row in read_rows(tmp_path / "out")])
    assert samples[0] == samples[1] == sorted(samples[0]) != samples[2]
    assert len(set(samples[0])) == 6
    assert call(tiny_model, *job) == 0
    assert [row["completion"] for row in read_rows(tmp_path / "out")[:4]] == [row["completion"] for row in limited]


def test_a_template_is_bound_to_the_output_by_its_text(
    tmp_path: Path, tiny_model: Path, job: list[object], capsys: pytest.CaptureFixture[str]
) -> None:
    template = tmp_path / "prompt.jinja"
    template.write_text("{{ name }}!")
    assert call(tiny_model, *job, "--template", f"@{template}") == 0
    assert [row["prompt_tokens"] for row in read_rows(tmp_path / "out")] == [1 + len(f"n{i}!") for i in range(30)]
    template.write_text("{{ name }}?")
    assert call(tiny_model, *job[:-1], "--template", f"@{template}") == 2
    assert "template was" in capsys.readouterr().err


def test_a_chat_template_replaces_the_models(tmp_path: Path, tiny_model: Path) -> None:
    path = write_jsonl(tmp_path / "in.jsonl", [{"messages": [{"role": "user", "content": "hi"}]}])
    template = tmp_path / "chat.jinja"
    template.write_text("{{ messages[0].content }}{{ messages[0].content }}")
    options = ["--input", path, "--output", tmp_path / "out", "--max-tokens", 2, "--chat-template"]
    assert call(tiny_model, *options, tmp_path / "absent.jinja") == 2
    assert call(tiny_model, *options, template) == 0
    assert read_rows(tmp_path / "out")[0]["prompt_tokens"] == 4
    template.write_text("x")
    assert call(tiny_model, *options, template) == 2


def test_the_temperature_of_a_weather_table_steers_only_where_it_is_named(
    tmp_path: Path, tiny_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    weather = [{"prompt": "rain", "temperature": 21.5}, {"prompt": "snow", "temperature": -3.5}]
    path = write_jsonl(tmp_path / "in.jsonl", weather)
    options = ["--input", path, "--max-tokens", 2, "--ignore-eos"]
    for choice in ("auto", "none"):
        assert call(tiny_model, *options, "--output", tmp_path / choice, "--param-columns", choice) == 0
        assert ("`temperature` does not: it holds values" in capsys.readouterr().err) == (choice == "auto")
        rows = read_rows(tmp_path / choice)
        assert [(r["error_code"], r["temperature"], r["completion_tokens"]) for r in rows] == [
            (None, 21.5, 2),
            (None, -3.5, 2),
        ]
    assert call(tiny_model, *options, "--output", tmp_path / "named", "--param-columns", "temperature") == 0
    assert [r["error_code"] for r in read_rows(tmp_path / "named")] == [None, "bad_parameter"]


def test_columns_types_and_metadata_of_the_input_pass_through_and_a_prefix_avoids_clashes(
    tmp_path: Path, tiny_model: Path
) -> None:
    schema = pa.schema(
        [
            pa.field("id", pa.int64(), metadata={"unit": "one"}),
            pa.field("prompt", pa.dictionary(pa.int32(), pa.string())),
            pa.field("completion", pa.string()),
            pa.field("at", pa.timestamp("ns", "US/Eastern")),
            pa.field("nested", pa.list_(pa.struct([("x", pa.int8())]))),
        ],
        metadata={"made": "by hand"},
    )
    values: dict[str, list[Any]] = {"id": [9007199254740993, None], "prompt": ["a", "a"], "completion": ["old", None]}
    values |= {"at": [1, None], "nested": [[{"x": 1}], []]}
    table = pa.table([pa.array(values[f.name], f.type) for f in schema], schema=schema)
    pq.write_table(table, tmp_path / "in.parquet")
    options = ["--input", tmp_path / "in.parquet", "--output", tmp_path / "out", "--max-tokens", 2]
    assert call(tiny_model, *options) == 2
    assert not (tmp_path / "out").exists()
    assert call(tiny_model, *options, "--output-prefix", "new_") == 0
    written = pq.read_table(tmp_path / "out" / "part-00000.parquet")
    assert written.select(schema.names).equals(table)
    assert written.schema.metadata[b"made"] == b"by hand"
    assert written.schema.field("id").metadata == {b"unit": b"one"}
    assert written["new_completion"].null_count == 0


def test_parts_have_one_schema_and_cover_fixed_ranges_of_one_shard(tmp_path: Path, tiny_model: Path) -> None:
    first = write_jsonl(tmp_path / "a.jsonl", ROWS[:7])
    second = write_jsonl(tmp_path / "b.jsonl", [{**row, "prompt": None} for row in ROWS[:5]])
    inputs = ["--input", first, "--input", second, "--output", tmp_path / "out", "--rows-per-part", 4]
    assert call(tiny_model, *inputs, "--max-tokens", 2) == 0
    parts = [pq.read_table(path) for path in sorted((tmp_path / "out").glob("part-*.parquet"))]
    assert [part["id"].to_pylist() for part in parts] == [[0, 1, 2, 3], [4, 5, 6], [0, 1, 2, 3], [4]]
    assert len({part.schema for part in parts}) == 1
    assert parts[0]["error_code"].type == parts[3]["completion"].type == pa.string()


def test_stop_strings_ids_and_biases_of_flags_and_rows(tmp_path: Path, tiny_model: Path) -> None:
    a, b, c = ({str(SHIFT + ord(character)): 10_000.0} for character in "abc")
    rows = [
        {"prompt": "x", "logit_bias": a, "stop": "aaa"},
        {"prompt": "x", "logit_bias": b, "stop_token_ids": [SHIFT + ord("b")]},
        {"prompt": "x", "logit_bias": c, "stop": None},
        {"prompt": "x", "logit_bias": {str(EOS): 10_000.0}, "min_tokens": 2},
    ]
    path = write_jsonl(tmp_path / "in.jsonl", rows)
    options = ["--input", path, "--output", tmp_path / "out", "--max-tokens", 9, "--stop", "cc", "--output-token-ids"]
    assert call(tiny_model, *options) == 0
    answers = read_rows(tmp_path / "out")
    assert [(r["completion"], r["finish_reason"], r["stop_reason"]) for r in answers[:3]] == [
        ("", "stop", "aaa"),
        ("", "stop", str(SHIFT + ord("b"))),
        ("", "stop", "cc"),
    ]
    assert [r["completion_tokens"] for r in answers] == [3, 1, 2, 3]
    assert answers[3]["completion_token_ids"][-1] == EOS
    assert EOS not in answers[3]["completion_token_ids"][:2]
    assert answers[3]["completion_token_ids"][0] != BOS


def test_a_single_file_beside_its_input_is_not_answered_by_the_same_command_run_again(
    tmp_path: Path, tiny_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_jsonl(tmp_path / "a.jsonl", [{"prompt": "hi"}])
    for text in (f"{tmp_path}/*.jsonl", str(tmp_path)):
        output = tmp_path / f"out{len(text)}.jsonl"
        options = ["--input", text, "--output", output, "--max-tokens", 2]
        assert call(tiny_model, *options) == 0
        capsys.readouterr()
        assert call(tiny_model, *options) == 0
        assert "is finished already" in capsys.readouterr().err
        output.unlink()
