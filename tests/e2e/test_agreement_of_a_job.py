"""`bench throughput --agreement` over whole jobs on a tiny model."""

import json

import pytest
from tiny_jobs import read_rows, save_tiny_model, write_jsonl

from batchinfer.cli import main as command_line

ROWS = [{"prompt": "abcdefgh"[:n] * 3, "max_tokens": 4 + n} for n in range(1, 8)]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_tiny_model(tmp_path_factory.mktemp("model"))


def options(model, tmp_path, dtype, *more):
    rows = write_jsonl(tmp_path / "rows.jsonl", ROWS)
    job = ["--model", model, "--input", rows, "--temperature", 0, "--threads", 1, "--kv-cache-memory", "1MiB"]
    return list(map(str, [*job, "--ignore-eos", "--activation-dtype", dtype, *more]))


def figures(model, tmp_path, dtype, *more):
    file = tmp_path / "figures.json"
    arguments = ["bench", "throughput", *options(model, tmp_path, dtype, "--json", file, *more)]
    assert command_line._run(arguments) == 0
    return json.loads(file.read_text())


def completions(model, tmp_path, dtype):
    output = tmp_path / f"{dtype}.jsonl"
    arguments = options(model, tmp_path, dtype, "--output", output, "--output-token-ids")
    assert command_line._run(["run", *arguments]) == 0
    return [row["completion_token_ids"] for row in read_rows(output)]


def test_float32_agrees_with_itself(model, tmp_path):
    stats = figures(model, tmp_path, "auto", "--agreement")
    assert stats["agreement_tokens_mean"] == sum(row["max_tokens"] for row in ROWS) / len(ROWS)
    assert stats["rows"] == len(ROWS)
    assert stats["agreement_seconds"] > 0


def test_int8_agrees_as_far_as_the_files_of_both_runs_do(model, tmp_path):
    counts = []
    for tokens, reference in zip(*(completions(model, tmp_path, d) for d in ("int8", "auto")), strict=True):
        equal = [a == b for a, b in zip(tokens, reference, strict=True)]
        counts.append([*equal, False].index(False))
    stats = figures(model, tmp_path, "int8", "--kv-cache-dtype", "auto", "--agreement-with", str(model))
    assert stats["agreement_tokens_mean"] == sum(counts) / len(counts)
    assert 0 < stats["agreement_tokens_mean"] < sum(row["max_tokens"] for row in ROWS) / len(ROWS)


def test_no_agreement_without_being_asked(model, tmp_path):
    assert not [name for name in figures(model, tmp_path, "auto") if name.startswith("agreement")]
