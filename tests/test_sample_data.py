"""The sample data are what the README and the jobs say they are."""

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

SAMPLES = Path(__file__).parent.parent / "sample_data"


def test_prompts():
    table = pq.read_table(SAMPLES / "prompts.parquet")
    assert table.column_names == ["id", "topic", "prompt", "max_tokens", "temperature"]
    assert table.num_rows == 24
    assert len(set(table["id"].to_pylist())) == 24
    assert table.schema.field("max_tokens").type == pa.int32()
    assert all(1 <= n <= 96 for n in table["max_tokens"].to_pylist())
    for prompt in table["prompt"].to_pylist():
        assert prompt.startswith("<|im_start|>system\n")
        assert prompt.endswith("<|im_end|>\n<|im_start|>assistant\n")


def test_chats():
    rows = [json.loads(line) for line in (SAMPLES / "chats.jsonl").read_text(encoding="utf-8").splitlines()]
    assert {"id", "messages", "max_tokens"} == set().union(*rows)
    assert all(row["messages"][-1]["role"] == "user" for row in rows)
    assert {type(message["content"]) for row in rows for message in row["messages"]} == {str, list}


def test_troublesome_rows_are_as_troublesome_as_they_say():
    lines = (SAMPLES / "troublesome.jsonl").read_text(encoding="utf-8").splitlines()
    unreadable = [line for line in lines if not _is_json(line)]
    assert len(unreadable) == 2
    rows = {row["id"]: row for row in map(json.loads, (line for line in lines if line not in unreadable))}
    assert len(rows) == len(lines) - 3, "one id stands there twice"
    assert rows["null"]["prompt"] is None
    assert "prompt" not in rows["missing"]
    assert rows["empty"]["prompt"] == ""
    assert not isinstance(rows["number"]["prompt"], str)
    assert len(rows["too-long"]["prompt"].split()) > 8192
    assert rows["last"] == json.loads(lines[-1])


def _is_json(line: str) -> bool:
    try:
        json.loads(line)
    except ValueError:
        return False
    return True


@pytest.mark.parametrize("name", ["prompts.parquet", "chats.jsonl", "troublesome.jsonl"])
def test_samples_are_small(name):
    assert (SAMPLES / name).stat().st_size < 64 * 1024
