"""Sizes of the KV cache against arithmetic done by hand, and what the user is told."""

import pytest

from batchinfer.cache.spec import KVCacheSpec
from batchinfer.config import JobConfig
from batchinfer.errors import UsageError
from batchinfer.executors.cache_size import activation_bytes, describe, memory_budget, memory_table, size_cache
from batchinfer.executors.local import available_memory, choose_device, usable_processors
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
    assert (found.num_blocks, found.max_model_len, found.model_len_reason) == (3 * 7, 100, "as asked for")


@pytest.mark.parametrize(("device", "options", "share"), [
    ("cpu", {}, 0.5), ("cuda", {}, 0.9), ("cpu", {"gpu_memory_utilization": 0.25}, 0.25),
])  # fmt: skip
def test_a_share_of_free_memory_less_weights_and_activations(device, options, share):
    weights = 30 << 20
    found = size(GIB, device, weights, max_num_seqs=10_000, **options)
    left = int(share * GIB) - weights - activation_bytes(MODEL, 2048)
    assert 0 < left < GIB
    assert found.num_blocks == min(left // BLOCK_BYTES, 10_000 * 32)


def test_scratch_of_products_counts_as_activations():
    config = JobConfig.from_options({"max_num_seqs": 10_000})
    scratch = 1000 * BLOCK_BYTES
    plain, less = (size_cache(config, MODEL, CACHE, 0, GIB, "cuda", each) for each in (0, scratch))
    assert plain.num_blocks - less.num_blocks == 1000
    budgets = [memory_budget(config, MODEL, 0, GIB, "cuda", CACHE, 10, each) for each in (0, scratch)]
    assert budgets[1]["activations_bytes"] - budgets[0]["activations_bytes"] == scratch
    assert budgets[1]["total_bytes"] - budgets[0]["total_bytes"] == scratch


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
