"""What changed between two jobs, in words."""

import math
from dataclasses import dataclass
from typing import Any

import pytest

from batchinfer.config import JobConfig
from batchinfer.data.manifest import JobManifest
from batchinfer.data.output_layout import OutputLayout


@dataclass
class _Shard:
    uri: str
    fingerprint: str
    num_rows: int = 2


A, B, C = _Shard("a", "fa"), _Shard("b", "fb"), _Shard("c", "fc")


def _manifest(shards: list[_Shard], model: str = "m", **options: Any) -> JobManifest:
    return JobManifest.make(shards, model, options)


def test_equal_jobs_have_no_changes_also_after_a_round_trip() -> None:
    options = JobConfig.from_options({"stop": ("x", "y"), "top_p": 0.5}).fingerprint_options()
    first = JobManifest.make([A, B], "m", options)
    again = JobManifest.from_json(first.to_json())
    assert again == first
    assert again.changes(JobManifest.make([A, B], "m", options)) == []
    assert first.job_id != JobManifest.make([A, B], "m", options).job_id


def test_moved_files_with_equal_content_are_the_same_job() -> None:
    moved = _Shard("/elsewhere/a", "fa")
    assert _manifest([A], input=["a"]).changes(_manifest([moved], input=["/elsewhere/*"])) == []


@pytest.mark.parametrize(
    ("was", "now", "words"),
    [
        ([A, B], [A, _Shard("b", "other")], "shard 1 (b) changed: content differs"),
        ([A, B], [_Shard("a", "other", 3), B], "shard 0 (a) changed: 2 rows, now 3"),
        ([A, B, C], [A, C, B], "the order of the shards changed: shard 1 was b, now c"),
        ([A, B], [A, B, C], "the input has 3 shards, was 2 (new: c)"),
        ([A, B], [B], "the input has 1 shards, was 2 (missing: a)"),
        ([A, B], [C, _Shard("b", "other"), A], "the input has 3 shards, was 2 (new: c; changed: b)"),
    ],
)
def test_shards(was: list[_Shard], now: list[_Shard], words: str) -> None:
    assert _manifest(was).changes(_manifest(now)) == [words]


def test_model_and_options() -> None:
    was = _manifest([A], temperature=0.0, stop=None, max_tokens=5, model_name="x")
    now = _manifest([A], "n", temperature=0.7, stop=("é",), max_tokens=5, top_p=math.inf)
    assert was.changes(now) == [
        "the model changed",
        '--model-name was "x", now not given',
        "--stop was not given, now é",
        "--temperature was 0.0, now 0.7",
        "--top-p was not given, now inf",
    ]


def test_options_are_said_as_on_the_command_line() -> None:
    was = _manifest([A], output_token_ids=False, stop=["a", "b c"], template="x" * 200, rows_per_part=50_000)
    now = _manifest([A], output_token_ids=True, stop=[], template="x" * 200 + "y", rows_per_part=5)
    assert was.changes(now) == [
        "--output-token-ids was off, now on",
        "--rows-per-part was 50000, now 5",
        '--stop was a "b c", now not given',
        "the text of --template changed",
    ]


def test_another_choice_of_the_same_rows() -> None:
    two, all_rows = _manifest([A], limit=2, temperature=0.0), _manifest([A], limit=None, temperature=0.0)
    assert two.differs_in_selection_only(all_rows)
    assert all_rows.differs_in_selection_only(_manifest([A], limit=None, sample=7, temperature=0.0))
    assert not two.differs_in_selection_only(two)
    assert not two.differs_in_selection_only(_manifest([A], limit=3, temperature=1.0))
    assert not two.differs_in_selection_only(_manifest([A], "n", limit=None, temperature=0.0))


@pytest.mark.parametrize(
    "text", [b"", b"{}", b"[]", b"not json", b'{"shards": [1], "parts": []}', b'{"shards":[],"parts":[]}']
)
def test_what_is_not_a_manifest(text: bytes) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - json's own error or ours
        JobManifest.from_json(text)


@pytest.mark.parametrize(
    ("target", "root", "file", "work"),
    [
        ("out", "out", None, "_work"),
        ("a/out/", "a/out", None, "_work"),
        ("/x.parquet", "/", "x.parquet", "x.parquet.work"),
        ("x.jsonl", ".", "x.jsonl", "x.jsonl.work"),
        ("s3://bucket/x.jsonl.zst", "s3://bucket", "x.jsonl.zst", "x.jsonl.zst.work"),
        ("s3://bucket/out", "s3://bucket/out", None, "_work"),
    ],
)
def test_layout(target: str, root: str, file: str | None, work: str) -> None:
    layout = OutputLayout.of(target)
    assert (layout.root, layout.file, layout.work) == (root, file, work)
