"""The jobs of --confirm: sizes worked out apart, equal on each call; and the memory that each technique gets."""

import itertools
import json
from pathlib import Path

import pytest

from batchinfer.comparison.techniques import Technique, techniques
from batchinfer.comparison.workloads import distinct_tokens, even_lengths, heavy_tail, shared_prefixes
from batchinfer.models.families.registry import parse_config

VOCAB = 1000
# Of SmolLM2-135M's shape: 2 (keys, values) x 30 layers x 3 heads x 64 x 2 bytes, in blocks of 16 tokens
BLOCK_BYTES = 2 * 30 * 3 * 64 * 2 * 16
SPEC = parse_config(
    {
        "model_type": "llama",
        "vocab_size": VOCAB,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "torch_dtype": "bfloat16",
    },
    "config.json",
)


@pytest.mark.parametrize("make", [heavy_tail, shared_prefixes, lambda vocab: even_lengths(vocab, 5)])
def test_a_workload_is_the_same_each_time_and_its_file_holds_it(make, tmp_path: Path):
    workload = make(VOCAB)
    assert workload.rows == make(VOCAB).rows
    ids = [token for row in workload.rows for token in row["prompt_token_ids"]]
    assert 0 <= min(ids) <= max(ids) < VOCAB
    path = workload.write(tmp_path)
    assert [json.loads(line) for line in path.read_text().splitlines()] == workload.rows
    assert workload.longest == max(len(row["prompt_token_ids"]) + row["max_tokens"] for row in workload.rows)


def test_the_tail_is_heavy_and_scattered():
    lengths = [row["max_tokens"] for row in heavy_tail(VOCAB).rows]
    rising = sorted(lengths)
    assert (len(lengths), rising[0], rising[-1]) == (72, 8, 256)
    assert rising[35] <= 16 <= rising[36]
    assert 0.4 < sum(rising[-7:]) / sum(rising) < 0.6
    for x in (20, 40, 80, 160):  # P(length > x) = 8 / x
        assert sum(length > x for length in lengths) == pytest.approx(72 * 8 / x, abs=1.5)
    batches = [max(lengths[start : start + 8]) for start in range(0, 72, 8)]
    assert sum(batches) / 9 > 3 * sum(lengths) / 72  # the steps of static batches against what they generate


def test_beginnings_are_shared_by_six_rows_each_and_shuffled():
    rows = shared_prefixes(VOCAB).rows
    beginnings = [tuple(row["prompt_token_ids"][:400]) for row in rows]
    assert {beginnings.count(beginning) for beginning in beginnings} == {6}
    assert {len(row["prompt_token_ids"]) for row in rows} == {424}
    neighbours = sum(a == b for a, b in itertools.pairwise(beginnings))
    assert neighbours < 15


def test_distinct_tokens_count_each_shared_beginning_once():
    assert distinct_tokens(shared_prefixes(VOCAB), 16) == 8 * 400 + 48 * (24 + 16)
    assert distinct_tokens(shared_prefixes(VOCAB), 64) == 8 * 384 + 48 * (16 + 24 + 16)
    assert distinct_tokens(even_lengths(VOCAB, 5), 16) == 5 * 128


def chosen(models=None) -> dict[str, Technique]:
    return {technique.option: technique for technique in techniques(SPEC, "bf16", models)}


def test_memory_is_in_closed_form():
    memory = {option: technique.settings["kv_cache_memory"] / BLOCK_BYTES for option, technique in chosen().items()}
    assert memory == {
        "batching": 8 * 17,  # (16 + 256) / 16 blocks for the longest of each of 8 places
        "kv_allocation": 4 * 17,
        "enable_prefix_caching": 48 * 28,  # (424 + 16) / 16 = 27.5
        "order": (8 * 400 + 48 * 40) / 4 / 16,
        "kv_cache_dtype": 8 * 8,  # (64 + 64) / 16
    }


def test_rows_keep_their_order_where_batching_and_allocation_are_compared():
    assert {option for option, technique in chosen().items() if technique.settings.get("order") == "input"} == {
        "batching",
        "kv_allocation",
    }


def test_weights_are_compared_where_others_are_named():
    assert "model" not in chosen()
    weights = chosen(("a", "b"))["model"]
    assert (weights.without, weights.applied) == ("a", "b")
    assert weights.settings["max_num_seqs"] == 4
    assert weights.settings["kv_cache_memory"] == 4 * 8 * BLOCK_BYTES
