"""early_pages: for which jobs a cache's memory is asked for ahead, and how much of it."""

import json
import sys

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tiny_models import make_hf_model

from batchinfer.config import JobConfig
from batchinfer.data.job_input import JobInput
from batchinfer.executors.cache_size import activation_bytes
from batchinfer.executors.early_pages import early_pages
from batchinfer.models.loader import load_spec
from batchinfer.models.resolve import ModelFiles
from batchinfer.request import SamplingParams

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="pages are reserved on Linux only")


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> ModelFiles:
    path = tmp_path_factory.mktemp("model")
    make_hf_model("llama").save_pretrained(path)
    return ModelFiles(path, "a random model", None, "")


@pytest.fixture(scope="module")
def job(tmp_path_factory) -> JobInput:
    path = tmp_path_factory.mktemp("rows") / "rows.parquet"
    pq.write_table(pa.table({"prompt": [f"{i:02d}" + "x" * 98 for i in range(40)]}), path)
    config = JobConfig.from_options({"input": (str(path),)})
    return JobInput.read(config.input, 0, lambda line: None)


def asked(monkeypatch, files, job, num_left, **options) -> tuple[int, int] | None:
    """Blocks asked for, and reserved."""
    counts = []
    monkeypatch.setattr("batchinfer.cache.host_pages.HostPages.ask_for", lambda self, count: counts.append(count()))
    config = JobConfig.from_options({"device": "cpu", "block_size": 4, "kv_cache_memory": 1 << 20, **options})
    defaults = SamplingParams(max_tokens=12, ignore_eos=True)
    pages = early_pages(config, files, job, defaults, num_left, "cpu", 1 << 30)
    return None if pages is None else (counts[0], pages.most_blocks)


def test_rows_at_once_hold_at_least_their_prompts_and_answers(monkeypatch, files, job):
    most = (1 << 20) // (4 * 2 * 2 * 2 * 8 * 4)  # tokens, keys and values, layers, heads, head size, float32
    assert asked(monkeypatch, files, job, 40, max_num_seqs=10) == (10 * (25 + 12) // 4, min(most, 10 * 64 // 4))
    assert asked(monkeypatch, files, job, 3, max_num_seqs=10) == (3 * (25 + 12) // 4, min(most, 10 * 64 // 4))


def test_what_rows_begin_with_is_held_once_unless_nothing_is_shared(monkeypatch, tmp_path, files):
    pq.write_table(pa.table({"prompt": ["x" * 98 + f"{i:02d}" for i in range(40)]}), tmp_path / "rows.parquet")
    config = JobConfig.from_options({"input": (str(tmp_path / "rows.parquet"),)})
    job = JobInput.read(config.input, 0, lambda line: None)
    shared = 5 * 4  # of 24.75 tokens in common, less half a block, whole blocks
    most = (1 << 20) // (4 * 2 * 2 * 2 * 8 * 4)
    reserved = min(most, 10 * 64 // 4)
    assert asked(monkeypatch, files, job, 40, max_num_seqs=10) == (10 * (25 + 12 - shared) // 4, reserved)
    for option in ({"enable_prefix_caching": False}, {"kv_allocation": "contiguous"}):
        alone = asked(monkeypatch, files, job, 40, max_num_seqs=10, **option)
        assert alone is not None
        assert alone[0] == min(10 * (25 + 12) // 4, alone[1])


def test_an_8_bit_cache_has_room_for_more_blocks(monkeypatch, files, job):
    wide = asked(monkeypatch, files, job, 40, max_num_seqs=256, kv_cache_memory=1 << 16)
    narrow = asked(monkeypatch, files, job, 40, max_num_seqs=256, kv_cache_memory=1 << 16, kv_cache_dtype="fp8")
    assert [wide and wide[1], narrow and narrow[1]] == [(1 << 16) // (32 * (8 * 4)), (1 << 16) // (32 * (8 + 4))]


def test_what_loading_refuses_is_left_to_loading(monkeypatch, tmp_path, files, job):
    assert asked(monkeypatch, files, job, 40, kv_cache_memory=64) is None
    assert asked(monkeypatch, files, job, 40, kv_cache_dtype="fp8", kv_cache_dtype_skip_layers="7") is None
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "unheard of"}))
    assert asked(monkeypatch, ModelFiles(tmp_path, "", None, ""), job, 40) is None


def test_no_more_is_asked_for_than_is_there_beside_the_weights(monkeypatch, files, job):
    weights = sum(file.stat().st_size for file in files.path.glob("*.safetensors"))
    counts = []
    monkeypatch.setattr("batchinfer.cache.host_pages.HostPages.ask_for", lambda self, count: counts.append(count()))
    config = JobConfig.from_options({"device": "cpu", "block_size": 4, "gpu_memory_utilization": 0.5})
    allowance = activation_bytes(load_spec(files.path), config.scheduler.max_num_batched_tokens)
    block = 4 * 2 * 2 * 2 * 8 * 4
    free_bytes = 2 * (allowance + 2 * weights + 5 * block)
    pages = early_pages(config, files, job, SamplingParams(max_tokens=12, ignore_eos=True), 40, "cpu", free_bytes)
    assert counts == [5]
    assert pages is not None
    assert pages.most_blocks == (2 * weights + 5 * block) // block


def test_a_gpu_has_none(files, job):
    assert early_pages(JobConfig.from_options({}), files, job, SamplingParams(), 40, "cuda", 1 << 30) is None
