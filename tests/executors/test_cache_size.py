"""Sizes of the KV cache against arithmetic done by hand, and what the user is told."""

from dataclasses import replace

import pytest

from batchinfer.cache.spec import KVCacheSpec
from batchinfer.config import JobConfig
from batchinfer.errors import UsageError
from batchinfer.executors.cache_size import activation_bytes, describe, memory_budget, memory_table, size_cache
from batchinfer.executors.local import available_memory, choose_device, usable_processors
from batchinfer.executors.step_memory import written_out_bytes
from batchinfer.models.spec import DecoderSpec, RopeSpec

MODEL = DecoderSpec(
    family="llama",
    vocab_size=1000,
    hidden_size=64,
    intermediate_size=128,
    num_layers=2,
    num_q_heads=4,
    num_kv_heads=2,
    head_dim=16,
    max_position_embeddings=512,
    activation="silu",
    rms_norm_eps=1e-5,
    qkv_bias=False,
    output_bias=False,
    mlp_bias=False,
    qk_norm=False,
    tie_word_embeddings=True,
    sliding_windows=(None, None),
    rope=RopeSpec(kind="default", theta=1e4, rotary_dim=16, max_position_embeddings=512),
    dtype="bf16",
)
BLOCK_BYTES = 2 * 2 * 2 * 16 * 2 * 16  # keys and values, layers, heads, width, bytes, tokens: 4,096
CACHE = KVCacheSpec(2, 2, 16, 16, "bf16", False)
GIB = 1 << 30


def size(free_bytes: int = GIB, device: str = "cpu", weight_bytes: int = 0, **options):
    return size_cache(JobConfig.from_options(options), MODEL, CACHE, weight_bytes, free_bytes, device)


def test_memory_that_is_asked_for_is_cut_into_blocks():
    found = size(kv_cache_memory=10 * BLOCK_BYTES + 5)
    assert (found.num_blocks, found.max_model_len) == (10, 160)
    assert found.model_len_reason == "what the KV cache holds; the model's is 512"


def test_no_more_blocks_than_the_sequences_can_fill():
    found = size(kv_cache_memory=GIB, max_num_seqs=3)
    assert (found.num_blocks, found.max_model_len, found.model_len_reason) == (3 * 512 // 16, 512, "the model's")
    found = size(kv_cache_memory=GIB, max_num_seqs=3, max_model_len=100)
    assert (found.num_blocks, found.max_model_len, found.model_len_reason) == (3 * 7, 100, "fixed beforehand")


@pytest.mark.parametrize(("device", "options", "share"), [
    ("cpu", {}, 0.5), ("cuda", {}, 0.9), ("cpu", {"gpu_memory_utilization": 0.25}, 0.25),
])  # fmt: skip
def test_a_share_of_free_memory_less_weights_and_activations(device, options, share):
    weights = 30 << 20
    found = size(GIB, device, weights, max_num_seqs=10_000, **options)
    left = int(share * GIB) - weights - activation_bytes(MODEL, 2048)
    if device == "cuda":  # a segment a sequence of 512 tokens, twice, and captured steps
        parts = 10_000 * 4 * (16 + 2) * 4
        sizes = [1, 2, 4, 8, *range(16, 128, 16), *range(128, 256, 32), *range(256, 10_000, 64), 10_000]
        left -= 2 * parts + 10_000 * 4 * (4 * 64 + 3 * 128 + 2 * 8 * 16) + sum(sizes) * 64 * 2
    assert 0 < left < GIB
    assert found.num_blocks == min(left // BLOCK_BYTES, 10_000 * 32)


def test_scratch_of_products_counts_as_activations():
    config = JobConfig.from_options({"max_num_seqs": 10_000})
    scratch = 1000 * BLOCK_BYTES
    plain, less = (size_cache(config, MODEL, CACHE, 0, GIB, "cuda", each) for each in (0, scratch))
    assert plain.num_blocks - less.num_blocks == 2000  # once for the steps that are captured
    budgets = [memory_budget(config, MODEL, 0, GIB, "cuda", CACHE, 10, each) for each in (0, scratch)]
    assert budgets[1]["activations_bytes"] - budgets[0]["activations_bytes"] == scratch
    assert budgets[1]["graphs_bytes"] - budgets[0]["graphs_bytes"] == scratch
    assert budgets[1]["total_bytes"] - budgets[0]["total_bytes"] == 2 * scratch


def test_the_allowance_grows_with_the_step():
    per_token = activation_bytes(MODEL, 1001) - activation_bytes(MODEL, 1000)
    widest_layer = 4 * (2 * MODEL.intermediate_size + MODEL.intermediate_size)  # gate, up and product in float32
    assert per_token >= widest_layer


def test_a_max_model_len_that_does_not_fit_is_refused_with_numbers():
    with pytest.raises(UsageError, match=r"--max-model-len 300 does not fit the KV cache: 40 KiB hold 160 tokens"):
        size(kv_cache_memory=10 * BLOCK_BYTES, max_model_len=300)
    assert size(kv_cache_memory=19 * BLOCK_BYTES, max_model_len=300).max_model_len == 300
    with pytest.raises(UsageError, match="--max-model-len 513: the model has positions for 512 tokens"):
        size(max_model_len=513)


@pytest.mark.parametrize("options", [{"kv_cache_memory": 100}, {"gpu_memory_utilization": 1e-6}])
def test_memory_for_no_block_is_refused(options):
    with pytest.raises(UsageError, match="a block of 16 tokens takes 4 KiB"):
        size(**options)


def test_what_is_said():
    lines = describe(size(kv_cache_memory=100 * BLOCK_BYTES, max_num_seqs=20), CACHE, 20)
    assert lines[0] == "max_model_len: 512 (the model's)"
    assert "400 KiB of bf16 holds 1,600 tokens in 100 blocks of 16" in lines[1]
    assert "fp8 would hold 1.60 times as many tokens as 16 bits" in lines[1]  # 32 bytes a vector against 16 + 4
    assert lines[2] == "sequences at once: 3 of max_model_len, 20 of up to 80 tokens"
    few_blocks = describe(size(kv_cache_memory=10 * BLOCK_BYTES), CACHE, 20)
    assert few_blocks[2] == "sequences at once: 1 of max_model_len, 10 of up to 16 tokens"
    fp8 = KVCacheSpec(2, 2, 16, 16, "fp8", True)
    assert "fp8 holds 1.60 times as many tokens as 16 bits" in describe(size(), fp8, 20)[1]


def test_devices():
    assert [choose_device("auto", has) for has in (True, False)] == ["cuda", "cpu"]
    assert choose_device("cpu", True) == "cpu"
    with pytest.raises(UsageError, match="--device cuda"):
        choose_device("cuda", False)
    assert usable_processors() >= 1


def test_a_containers_limit_counts(tmp_path):
    machine = available_memory(tmp_path / "none")
    (tmp_path / "memory.max").write_text("5000000\n")
    (tmp_path / "memory.current").write_text("4000000\n")
    assert available_memory(tmp_path) == 1_000_000
    (tmp_path / "memory.max").write_text("max\n")
    assert available_memory(tmp_path) == pytest.approx(machine, rel=0.5)


def test_the_budget_adds_up():
    config = JobConfig.from_options({"max_num_batched_tokens": 100})
    budget = memory_budget(config, MODEL, 1000, GIB, "cpu", CACHE, 10)
    # of each token in float32: 4 hidden states, gate, up and their product, and queries, keys and values twice
    assert budget["activations_bytes"] == 100 * 4 * (4 * 64 + 3 * 128 + 2 * (4 + 2 * 2) * 16)
    assert budget["cache_bytes"] == 10 * BLOCK_BYTES
    assert budget["limit_bytes"] == GIB // 2
    parts = ("weights_bytes", "activations_bytes", "logits_bytes", "cache_bytes")
    assert budget["total_bytes"] == sum(budget[name] for name in parts)
    table = "\n".join(memory_table(budget))
    assert "KV cache        40 KiB  10 blocks of 16 tokens" in table
    assert "of 512 MiB allowed; 1 GiB were free on the CPU" in table


def test_a_cache_of_a_given_size_has_no_limit():
    config = JobConfig.from_options({"kv_cache_memory": 10 * BLOCK_BYTES})
    assert memory_budget(config, MODEL, 1000, GIB, "cuda", CACHE, 10)["limit_bytes"] is None
    budget = memory_budget(config, MODEL, 1000, None, "cuda", CACHE, 10)
    assert budget["free_bytes"] is None
    assert "not known here" in memory_table(budget)[-1]


@pytest.mark.parametrize(
    ("free", "note"), [(GIB, "1 GiB were free on the CPU"), (1 << 20, "more than there is: 1 MiB")]
)
def test_more_than_is_free_is_said(free, note):
    config = JobConfig.from_options({"kv_cache_memory": 10 * BLOCK_BYTES})
    assert f"  {note}" in memory_table(memory_budget(config, MODEL, 1000, free, "cpu", CACHE, 10))[-1]


LLAMA = replace(
    MODEL,
    vocab_size=128256,
    hidden_size=4096,
    intermediate_size=14336,
    num_layers=32,
    num_q_heads=32,
    num_kv_heads=8,
    head_dim=128,
    max_position_embeddings=131072,
    sliding_windows=(None,) * 32,
)
FP8 = KVCacheSpec(32, 8, 128, 16, "fp8", True)


def llama_budget(cache, num_blocks=65536, **options):
    config = JobConfig.from_options({"max_num_seqs": 100, "max_num_batched_tokens": 3000, **options})
    return memory_budget(config, LLAMA, 0, 80 * GIB, "cuda", cache, num_blocks)


def test_what_a_gpus_attention_holds():
    """32 segments of 128 values, a sum and a maximum; beside an fp8 cache a number for each of 3,000 tokens, 32 heads
    and 512 runs of 256 positions, and two tables of vectors for each of these, layer and KV head."""
    sums = 100 * 32 * 32 * (128 + 2) * 4
    assert llama_budget(replace(FP8, dtype="bf16", per_token_scales=False))["attention_bytes"] == sums
    bias, tables = 3000 * 32 * 512 * 4, 2 * 32 * 512 * 8 * 128 * 4
    assert llama_budget(FP8)["attention_bytes"] == sums + bias + tables
    # 1,000 tokens have 2 segments of 512 and 4 runs of 256
    short = llama_budget(FP8, max_model_len=1000)["attention_bytes"]
    assert short == 100 * 32 * 2 * 130 * 4 + 3000 * 32 * 4 * 4 + 2 * 32 * 4 * 8 * 128 * 4
    # as many tokens as the cache has, and one run of positions needs no products
    assert llama_budget(FP8, num_blocks=16)["attention_bytes"] == 100 * 32 * 130 * 4 + 2 * 32 * 8 * 128 * 4
    by_length = replace(LLAMA, rope=replace(LLAMA.rope, kind="dynamic"))
    config = JobConfig.from_options({"max_num_seqs": 100})
    assert memory_budget(config, by_length, 0, GIB, "cuda", FP8, 65536)["attention_bytes"] == sums


def test_what_captured_steps_hold():
    """What 100 rows work in, once, and the hidden states that each graph returns, at four widths of the table."""
    rows = 100 * 4 * (4 * 4096 + 3 * 14336 + 2 * (32 + 16) * 128)
    returned = (1 + 2 + 4 + 8 + 16 + 32 + 48 + 64 + 80 + 96 + 100) * 4096 * 2
    sums, bias = 100 * 32 * 32 * 130 * 4, 100 * 32 * 512 * 4
    assert llama_budget(FP8)["graphs_bytes"] == rows + sums + bias + 4 * returned
    assert llama_budget(FP8, enforce_eager=True)["graphs_bytes"] == 0
    table = memory_table(llama_budget(FP8))
    assert sum(line.startswith(("attention ", "graphs ")) for line in table) == 2
    on_cpu = memory_budget(JobConfig.from_options({}), LLAMA, 0, GIB, "cpu", FP8, 10)
    assert on_cpu["attention_bytes"] == on_cpu["graphs_bytes"] == 0
    assert not [line for line in memory_table(on_cpu) if line.startswith(("attention ", "graphs "))]


@pytest.mark.parametrize("free_gib", [24, 80])
def test_a_gpu_is_filled_to_its_limit_and_not_beyond(free_gib):
    config = JobConfig.from_options({"max_num_seqs": 256})
    scratch = written_out_bytes(LLAMA, "bf16")
    assert scratch == 2 * 2 * 14336 * 4096
    found = size_cache(config, LLAMA, FP8, 5 * GIB, free_gib * GIB, "cuda", scratch)
    budget = memory_budget(config, LLAMA, 5 * GIB, free_gib * GIB, "cuda", FP8, found.num_blocks, scratch)
    assert 0.97 * budget["limit_bytes"] < budget["total_bytes"] <= budget["limit_bytes"]
