"""A million short rows through a model that computes nothing: memory stays flat, and what a row costs outside the
model."""

import json
from pathlib import Path

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from small_tokenizers import SHIFT, VOCAB_SIZE

from batchinfer import pipeline
from batchinfer.cache.block_pool import BlockPool
from batchinfer.cli import main as command_line
from batchinfer.config import JobConfig
from batchinfer.data.tokenizer import Tokenizer
from batchinfer.engine.engine import Engine
from batchinfer.engine.input_builder import ForwardBatch
from batchinfer.executors.local import LocalEngine
from batchinfer.models.resolve import ModelFiles
from batchinfer.models.step_work import StepWork

TOKENS = 2  # of each completion
ANSWER = "ok"
NO_WORK = StepWork(
    weight_bytes=0,
    kv_bytes_per_token=0,
    linear_flops_per_token=0,
    logits_flops_per_token=0,
    attention_flops_per_pair=0,
    dtype="fp32",
)


class NoModel:
    """Answers "ok" to everything, by the parity of a token's position."""

    vocab_size = VOCAB_SIZE
    device = torch.device("cpu")

    def __init__(self) -> None:
        self._logits = torch.zeros(2, VOCAB_SIZE)
        for row, character in enumerate(ANSWER):
            self._logits[row, SHIFT + ord(character)] = 1.0

    def forward(self, batch: ForwardBatch, cache: None, prompt_lens: torch.Tensor) -> torch.Tensor:
        return (batch.positions.new_ones(1) * (batch.token_ids == SHIFT + ord(ANSWER[0]))).float()[:, None]

    def compute_logits(self, hidden: torch.Tensor, scratch: torch.Tensor | None = None) -> torch.Tensor:
        return self._logits[hidden[:, 0].long()]


def load_no_model(config: JobConfig, files: ModelFiles, *_: object) -> Tokenizer:
    torch.set_num_threads(1)
    return Tokenizer.load(files.path)


def build_no_engine(config: JobConfig, tokenizer: Tokenizer, *_: object, **__: object) -> LocalEngine:
    pool = BlockPool(4096, config.cache.block_size)
    engine = Engine(NoModel(), None, pool, tokenizer, config.scheduler, frozenset(), 64)
    return LocalEngine(engine, tokenizer, "cpu", 0, NO_WORK)


def write_input(path: Path, num_rows: int) -> None:
    schema = pa.schema([("id", pa.int64()), ("prompt", pa.string())])
    with pq.ParquetWriter(path, schema) as writer:
        for start in range(0, num_rows, 50_000):
            ids = np.arange(start, min(start + 50_000, num_rows))
            writer.write_batch(pa.record_batch([pa.array(ids), pa.array([f"row {i}" for i in ids.tolist()])], schema))


@pytest.mark.parametrize("num_rows", [10_000, pytest.param(1_000_000, marks=pytest.mark.slow)])
def test_memory_is_flat_over_many_rows(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch, num_rows: int
) -> None:
    memory: list[int] = []  # resident bytes, each hundredth of the job
    step = Engine.step

    def observed_step(self: Engine) -> list[object]:
        results = step(self)
        if self.stats.sampled_tokens * 100 >= len(memory) * TOKENS * num_rows:
            memory.append(psutil.Process().memory_info().rss)
        return results

    write_input(tmp_path / "in.parquet", num_rows)
    monkeypatch.setattr(pipeline, "load_model", load_no_model)
    monkeypatch.setattr(pipeline, "build_engine", build_no_engine)
    monkeypatch.setattr(Engine, "step", observed_step)
    options = ["--input", tmp_path / "in.parquet", "--output", tmp_path / "out", "--max-tokens", TOKENS]
    assert command_line._run(["run", "--model", str(tiny_model), "--temperature", "0", *map(str, options)]) == 0

    half = len(memory) // 2
    growth = (max(memory[half:]) - max(memory[:half])) / 2**20
    print(f"memory: {memory[half] / 2**20:.0f} MiB at half of the job, {growth:+.1f} MiB after it")
    busy_seconds = json.loads((tmp_path / "out" / "_stats.json").read_text())["busy_seconds"]
    print(f"time outside the model: {busy_seconds / num_rows * 1e6:.0f} µs a row")
    assert growth < 30
    first = 0
    for part in sorted((tmp_path / "out").glob("part-*.parquet")):
        table = pq.read_table(part, columns=["id", "completion"])
        assert table["id"].to_pylist() == list(range(first, first + len(table)))
        assert set(table["completion"].to_pylist()) == {ANSWER}
        first += len(table)
    assert first == num_rows
