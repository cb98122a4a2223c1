"""The feeder's thread: rows in order, only those wanted, bounded batches, faults handed over."""

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from small_tokenizers import VOCAB_SIZE, save_byte_level

from batchinfer.config import InputConfig, JobConfig
from batchinfer.data.feeder import Feeder
from batchinfer.data.job_input import JobInput, default_output
from batchinfer.data.prompts import PromptBuilder
from batchinfer.data.tokenizer import Tokenizer
from batchinfer.errors import BatchInferError, UsageError
from batchinfer.request import Request, Result, SamplingParams

ROWS = 1500


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.load(save_byte_level(tmp_path_factory.mktemp("tokenizer")))


@pytest.fixture
def job_input(tmp_path: Path) -> JobInput:
    for name, num_rows in (("a", ROWS), ("b", 3)):
        prompts = [None if i % 100 == 99 else f"{name} {i}" for i in range(num_rows)]
        pq.write_table(pa.table({"prompt": prompts}), tmp_path / f"{name}.parquet")
    return JobInput.read(JobConfig(input=InputConfig(input=(str(tmp_path),))).input, 0, lambda line: None)


def make_feeder(job_input: JobInput, tokenizer: Tokenizer, n: int = 1, wanted: Any = None) -> Feeder:
    builder = PromptBuilder(
        source=job_input.source,
        tokenizer=tokenizer,
        defaults=SamplingParams(n=n, max_tokens=1),
        vocab_size=VOCAB_SIZE,
        max_model_len=64,
    )
    return Feeder(job_input.shard_set.shards, job_input.selection, builder, wanted or job_input.selected)


def take_all(feeder: Feeder) -> list[list[Request | Result]]:
    batches = []
    while not feeder.is_exhausted:
        batches.append(feeder.take(wait=True))
    assert batches.pop() == []
    return batches


@pytest.mark.parametrize("n", [1, 2, 300])
def test_entries_come_in_order_in_batches_of_bounded_size(job_input: JobInput, tokenizer: Tokenizer, n: int) -> None:
    with make_feeder(job_input, tokenizer, n) as feeder:
        batches = take_all(feeder)
    ids = [entry.id for batch in batches for entry in batch]
    expected = []
    for shard, num_rows in ((0, ROWS), (1, 3)):
        for row in range(num_rows):
            expected += [(shard, row, sample) for sample in range(1 if row % 100 == 99 else n)]
    assert [(i.shard, i.row, i.sample) for i in ids] == expected
    assert max(map(len, batches)) <= max(2 * 2048, 32 * n)  # nothing is known of the first 32 rows


def test_rows_that_are_not_wanted_are_left_out(job_input: JobInput, tokenizer: Tokenizer) -> None:
    done = np.random.default_rng(0).random(ROWS) < 0.5

    def wanted(shard: int, start: int, stop: int) -> Any:
        return ~done[start:stop] if shard == 0 else np.zeros(stop - start, np.bool_)

    with make_feeder(job_input, tokenizer, wanted=wanted) as feeder:
        rows = [(entry.id.shard, entry.id.row) for batch in take_all(feeder) for entry in batch]
    assert rows == [(0, row) for row in np.flatnonzero(~done).tolist()]


def test_a_fault_of_reading_is_raised_where_entries_are_taken(
    job_input: JobInput, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    (tmp_path / "b.parquet").unlink()
    with make_feeder(job_input, tokenizer) as feeder, pytest.raises(BatchInferError, match=r"b\.parquet"):
        take_all(feeder)


def test_closing_early_ends_the_thread(job_input: JobInput, tokenizer: Tokenizer) -> None:
    with make_feeder(job_input, tokenizer, n=300) as feeder:
        assert feeder.take(wait=True)
    assert feeder.is_exhausted
    assert "batchinfer-feeder" not in {thread.name for thread in threading.enumerate()}


@pytest.mark.parametrize(
    ("first_input", "output"),
    [
        ("a/b.parquet", "a/b.completions"),
        ("a/b.jsonl.gz", "a/b.completions"),
        ("a/shards/", "a/shards.completions"),
        ("s3://bucket/in.jsonl", "s3://bucket/in.completions"),
    ],
)
def test_the_default_output_stands_beside_the_input(first_input: str, output: str) -> None:
    assert default_output(first_input) == output


def test_the_default_output_of_the_working_directory_bears_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "shards" / "inner").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "shards")
    assert default_output(".") == default_output("./") == default_output("inner/..") == f"{tmp_path}/shards.completions"


@pytest.mark.parametrize("first_input", ["a/*.parquet", "hf://datasets/x:train"])
def test_an_input_without_a_place_beside_it_asks_for_an_output(first_input: str) -> None:
    with pytest.raises(UsageError, match="--output"):
        default_output(first_input)
