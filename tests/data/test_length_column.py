"""--length-class-column: the groups of rows, what is said of them, and that requests carry them."""

import pyarrow as pa
import pytest

from batchinfer.config import InputConfig, JobConfig
from batchinfer.data.byte_tokenizer import ByteTokenizer
from batchinfer.data.feeder import Feeder
from batchinfer.data.job_input import JobInput
from batchinfer.data.length_column import length_groups
from batchinfer.errors import UsageError
from batchinfer.request import SamplingParams


def read(tmp_path, lines, column, said=None) -> JobInput:
    (tmp_path / "rows.jsonl").write_text("".join(f"{line}\n" for line in lines))
    config = InputConfig(input=(str(tmp_path / "rows.jsonl"),), length_class_column=column)
    return JobInput.read(config, 0, (said if said is not None else []).append)


def test_values_of_any_type_make_groups():
    batch = pa.RecordBatch.from_pydict(
        {"text": ["a", None, "x" * 100], "number": [1.0, float("nan"), 2.0], "flag": [True, False, None]}
    )
    assert length_groups(batch, "text") == ["a", "", "x" * 64]
    assert length_groups(batch, "number") == ["1.0", "", "2.0"]
    assert length_groups(batch, "flag") == ["True", "False", ""]
    assert length_groups(batch, "absent") == ["", "", ""]


def test_values_that_python_cannot_represent_count_as_none():
    times = pa.array([0, 4 * 10**14, None], pa.timestamp("ms"))  # the second is of the year 14,645
    texts = pa.array([b"a", b"\xff", b"c"], pa.binary()).view(pa.string())
    zones = pa.array([0, 0, None], pa.timestamp("ms", "Nowhere/At_all"))
    batch = pa.RecordBatch.from_arrays([times, texts, zones], ["time", "text", "zone"])
    assert length_groups(batch, "time") == ["1970-01-01 00:00:00", "", ""]
    assert length_groups(batch, "text") == ["a", "", "c"]
    assert length_groups(batch, "zone") == ["", "", ""]


def test_requests_carry_the_group_of_their_row(tmp_path):
    lines = ['{"prompt": "a", "task": "long", "n": 2}', '{"prompt": "b"}', '{"prompt": "c", "task": 7}', "broken"]
    job = read(tmp_path, lines, "task")
    builder = job.builder(JobConfig(), ByteTokenizer(300), SamplingParams(), 300, 100, None)
    with Feeder(job.shard_set.shards, job.selection, builder, job.selected) as feeder:
        entries = feeder.take(wait=True)
    assert [getattr(entry, "length_group", "error") for entry in entries] == ["long", "long", "", "7", "error"]


def test_without_the_option_there_are_no_groups(tmp_path):
    job = read(tmp_path, ['{"prompt": "a", "task": "long"}'], None)
    builder = job.builder(JobConfig(), ByteTokenizer(300), SamplingParams(), 300, 100, None)
    assert builder.columns == ("prompt",)
    with Feeder(job.shard_set.shards, job.selection, builder, job.selected) as feeder:
        (request,) = feeder.take(wait=True)
    assert request.length_group is None


def test_a_column_that_is_not_there(tmp_path):
    with pytest.raises(
        UsageError, match="--length-class-column kind: there is no such column; the columns are `prompt`"
    ):
        read(tmp_path, ['{"prompt": "a"}'], "kind")


@pytest.mark.parametrize(
    ("count", "line"),
    [
        (1, "answer lengths: learnt for each value of `task`, 1 value in the first 5 rows"),
        (63, "answer lengths: learnt for each value of `task`, 63 values in the first 67 rows"),
        (64, "warning: --length-class-column: `task` has 64 values in the first 68 rows; lengths are learnt for each "),
    ],
)
def test_how_many_values_there_are_is_said(tmp_path, count, line):
    said: list[str] = []
    lines = [f'{{"prompt": "a", "task": {task}}}' for task in [*range(count), 0, 0, 0, "null"]]
    read(tmp_path, lines, "task", said)
    assert [text for text in said if text.startswith(line)] != []


@pytest.mark.parametrize(
    ("limit", "line"),
    [(None, "3 values in the first 1,000 rows"), (3, "2 values in the first 3 rows"), (1, "0 values in the first row")],
)
def test_the_rows_looked_at_are_counted(tmp_path, limit, line):
    """Also those of a file without the column, and no more than the job answers."""
    (tmp_path / "a.jsonl").write_text('{"prompt": "a"}\n')
    (tmp_path / "b.jsonl").write_text("".join(f'{{"prompt": "a", "task": {min(row, 2)}}}\n' for row in range(2000)))
    said: list[str] = []
    config = InputConfig(input=(str(tmp_path),), length_class_column="task", limit=limit)
    JobInput.read(config, 0, said.append)
    assert f"answer lengths: learnt for each value of `task`, {line}" in said
