"""What a GPU's engine is built with, as far as no GPU is needed: graphs for every number of rows, and of several widths
where attention's work grows with the table."""

import pytest
import torch
from transformers import LlamaConfig

from batchinfer.engine.staged_queue import StagedQueue
from batchinfer.executors.gpu_steps import gpu_steps
from batchinfer.models.families.registry import parse_config


class FakeDecoder:
    device = torch.device("cpu")
    has_key_offsets = True

    def __init__(self) -> None:
        config = LlamaConfig(hidden_size=64, num_attention_heads=4, num_hidden_layers=2, max_position_embeddings=32768)
        self.spec = parse_config(config.to_dict(), "config.json", ())


@pytest.fixture
def make_spec():
    from batchinfer.cache.spec import KVCacheSpec

    def make(dtype: str, per_token_scales: bool) -> KVCacheSpec:
        return KVCacheSpec(
            num_layers=2,
            num_kv_heads=4,
            head_dim=16,
            block_size=16,
            dtype=dtype,
            per_token_scales=per_token_scales,
            wide_dtype="bf16",
        )

    return make


def test_graphs_cover_all_rows_and_tables(make_spec):
    steps = gpu_steps(FakeDecoder(), make_spec("bf16", False), max_num_seqs=100, max_model_len=30_001, eager=False)
    assert isinstance(steps.queue, StagedQueue)
    assert steps.graphs.sizes[0] == 1
    assert steps.graphs.sizes[-1] == 100
    assert steps.graphs.widths == (128, 512, 1876)  # 30,001 tokens in blocks of 16
    short = gpu_steps(FakeDecoder(), make_spec("bf16", False), max_num_seqs=4, max_model_len=1500, eager=False)
    assert short.graphs.widths == (94,)
    long = [
        gpu_steps(FakeDecoder(), make_spec(*cache), max_num_seqs=4, max_model_len=100_000, eager=False).graphs.widths
        for cache in (("bf16", False), ("fp8", True))
    ]
    assert long == [(128, 512, 6250), (128, 512, 2048, 6250)]  # key offsets are multiplied with all of the table


def test_eager_steps_have_no_graphs(make_spec):
    assert gpu_steps(FakeDecoder(), make_spec("bf16", False), 100, 4096, eager=True).graphs is None
