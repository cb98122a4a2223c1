"""What an 8-bit cache leaves out of the keys: it is what they have in common, at each position, and attention does not
change by it."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

sys.path.append(str(Path(__file__).parent.parent / "models"))
from tiny_models import SIZES, Runner, make_hf_model, save

from batchinfer.cache.paged_kv import PagedKVCache
from batchinfer.cache_config import CacheConfig
from batchinfer.engine.key_statistics import measure_keys
from batchinfer.engine.whole_sequences import blocks_needed, run_whole
from batchinfer.errors import UsageError
from batchinfer.executors.local import cache_spec
from batchinfer.models.key_offsets import KeyOffsets, KeyStatistics
from batchinfer.models.loader import load_decoder

PROMPT = np.random.default_rng(1).integers(0, SIZES["vocab_size"], 700).astype(np.int32)
TEXT = np.random.default_rng(2).integers(0, SIZES["vocab_size"], 300).astype(np.int32)
BLOCK = 8
LAYERS, HEADS, DIM = 3, SIZES["num_key_value_heads"], 8
SLOW = {"rope_type": "default", "rope_theta": 1e6}
SLOW_PAIRS = torch.tensor([0.0, 0.0, 1.0, 1.0]).repeat(2)  # a thousandth of a radian a position and less
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 256}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}


def make_models(path, key_bias=0.0, key_weight=1.0, query_weight=1.0, **fields):
    """A Hugging Face model whose keys have `key_bias`, [DIM] or one number, with random signs in common, and ours."""
    fields = {"max_position_embeddings": 1024} | fields
    model = make_hf_model("qwen2", num_hidden_layers=LAYERS, initializer_range=0.1, **fields)
    signs = torch.sign(torch.randn(HEADS, DIM, generator=torch.Generator().manual_seed(3)))
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.k_proj.weight *= key_weight
            layer.self_attn.q_proj.weight *= query_weight
            layer.self_attn.k_proj.bias.copy_((key_bias * signs).flatten())
    return model, load_decoder(save(model, path), "fp32")


def make_decoder(path, *args, **fields):
    return make_models(path, *args, **fields)[1]


def known(mean):
    return KeyStatistics(mean, torch.ones_like(mean), torch.zeros_like(mean))


def hidden_states(decoder, kv_dtype, wide_layers=()):
    cache = PagedKVCache(decoder.kv_cache_spec(BLOCK, kv_dtype, wide_layers), blocks_needed([PROMPT], BLOCK))
    return run_whole(decoder, cache, [PROMPT], BLOCK)


@pytest.mark.parametrize("rope", [SLOW, YARN], ids=["default", "yarn"])
def test_offsets_of_constant_keys_are_their_means_over_a_segment(tmp_path, rope):
    """Keys that are one vector b before the rotation, which Hugging Face computes, yarn's factor included."""
    model, decoder = make_models(tmp_path, 2.5, 0.0, rope_parameters=rope)
    offsets = KeyOffsets(decoder.rope, measure_keys(decoder, TEXT, BLOCK))
    offsets.cover(700)
    b = model.model.layers[0].self_attn.k_proj.bias.detach().view(HEADS, DIM).double()
    assert b.abs().unique().tolist() == [2.5]
    cos, sin = (x[0].double() for x in model.model.rotary_emb(torch.zeros(1, 768, 1), torch.arange(768)[None]))
    turned = b * cos[:, None] + torch.cat((-b[:, DIM // 2 :], b[:, : DIM // 2]), -1) * sin[:, None]
    expected = turned.view(3, 256, HEADS, DIM).mean(1)
    assert (expected[0] - expected[2]).abs().max() > 1
    for layer in range(LAYERS):
        table = offsets.tables(layer)[0]
        torch.testing.assert_close(table[:3].double(), expected, rtol=1e-4, atol=1e-4)
        assert table.is_contiguous()


@pytest.mark.parametrize("rope", [SLOW, YARN], ids=["default", "yarn"])
def test_weights_are_the_mean_squares_of_queries_turned_to_the_segment(tmp_path, rope):
    """Queries that are one vector b a head before the rotation."""
    model, decoder = make_models(tmp_path, rope_parameters=rope, query_weight=0.0)
    offsets = KeyOffsets(decoder.rope, measure_keys(decoder, TEXT, BLOCK))
    offsets.cover(700)
    b = model.model.layers[1].self_attn.q_proj.bias.detach().view(-1, DIM).double()
    cos, sin = (x[0].double() for x in model.model.rotary_emb(torch.zeros(1, 768, 1), torch.arange(768)[None]))
    turned = b * cos[:, None] + torch.cat((-b[:, DIM // 2 :], b[:, : DIM // 2]), -1) * sin[:, None]
    expected = turned.square().view(3, 256, HEADS, -1, DIM).mean((1, 3))
    expected /= expected.mean(-1, keepdim=True)
    weights = offsets.tables(1)[1]
    torch.testing.assert_close(weights[:3].double(), expected, rtol=1e-3, atol=1e-3)
    assert weights.is_contiguous()
    assert (expected[0] - expected[2]).abs().max() > 0.2


def test_the_first_tokens_do_not_count(tmp_path):
    decoder = make_decoder(tmp_path)
    other = TEXT.copy()
    other[0] = (other[0] + 1) % SIZES["vocab_size"]
    first, second = (measure_keys(decoder, ids, BLOCK)[0] for ids in (TEXT, other))
    torch.testing.assert_close(first.mean, second.mean, rtol=1e-5, atol=1e-6)
    assert measure_keys(decoder, TEXT[:4], BLOCK) == [None] * LAYERS


def test_dimensions_that_do_not_turn_are_averaged_as_they_are(tmp_path):
    model = make_models(tmp_path, 2.5, 0.0)[0]
    config = json.loads((tmp_path / "config.json").read_text())
    config["rope_parameters"]["partial_rotary_factor"] = 0.5
    (tmp_path / "config.json").write_text(json.dumps(config))
    decoder = load_decoder(tmp_path, "fp32")
    assert decoder.spec.rope.rotary_dim == 4
    bias = model.model.layers[0].self_attn.k_proj.bias.detach().view(HEADS, DIM)
    statistics = measure_keys(decoder, TEXT, BLOCK)
    torch.testing.assert_close(statistics[0].mean, bias, rtol=1e-4, atol=1e-5)
    offsets = KeyOffsets(decoder.rope, statistics)
    offsets.cover(1)
    assert torch.equal(offsets.tables(0)[0][0, :, 4:], statistics[0].mean[:, 4:])
    assert (offsets.tables(0)[0][0, :, :4] - statistics[0].mean[:, :4]).abs().max() > 1


@pytest.mark.parametrize(("kv_dtype", "factor"), [("fp8", 3), ("fp8_e5m2", 3), ("int8", 2)])
def test_attention_gains_precision_where_keys_have_much_in_common(tmp_path, kv_dtype, factor):
    """Also far behind the positions at which it was measured."""
    decoder = make_decoder(tmp_path, 20 * SLOW_PAIRS, rope_parameters=SLOW)
    exact = hidden_states(decoder, "fp32")
    before = (hidden_states(decoder, kv_dtype) - exact).square().mean(-1).sqrt()
    decoder.take_off_keys(measure_keys(decoder, TEXT, BLOCK))
    after = (hidden_states(decoder, kv_dtype) - exact).square().mean(-1).sqrt()
    for part in (slice(20, 256), slice(256, 512), slice(512, 700)):
        assert after[part].mean() < before[part].mean() / factor


def test_attention_does_not_change_by_any_offset(tmp_path):
    """The cache of int8 is fine enough to see it: an offset of the size of the keys themselves."""
    decoder = make_decoder(tmp_path)
    exact, plain = hidden_states(decoder, "fp32"), hidden_states(decoder, "int8")
    generator = torch.Generator().manual_seed(5)
    decoder.take_off_keys([known(0.3 * torch.randn(HEADS, DIM, generator=generator)) for _ in range(LAYERS)])
    shifted = hidden_states(decoder, "int8")
    error = (plain - exact).abs().max()
    assert not torch.equal(shifted, plain)
    assert (shifted - exact).abs().max() < 6 * error


def test_a_row_has_the_same_bits_in_chunks_and_beside_others(tmp_path):
    decoder = make_decoder(tmp_path, 5.0)
    decoder.take_off_keys(measure_keys(decoder, TEXT, BLOCK))
    ids = torch.from_numpy(PROMPT).long()
    together = Runner(decoder, "fp8", BLOCK).step([("long", ids, 0, 700), ("short", ids, 0, 90)])
    runner = Runner(decoder, "fp8", BLOCK)
    alone = runner.step([("short", ids, 0, 90)])[0]
    cut = torch.cat([runner.step([("long", ids, start, end)])[0] for start, end in ((0, 250), (250, 260), (260, 700))])
    torch.testing.assert_close(alone, together[1], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(cut, together[0], rtol=1e-5, atol=1e-5)


def test_layers_without_a_scale_a_token_keep_their_keys_whole(tmp_path):
    decoder = make_decoder(tmp_path)
    before = [hidden_states(decoder, "fp32"), hidden_states(decoder, "fp8", range(LAYERS))]
    decoder.take_off_keys([known(torch.full((HEADS, DIM), 100.0))] * LAYERS)
    after = [hidden_states(decoder, "fp32"), hidden_states(decoder, "fp8", range(LAYERS))]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_layers_of_numbers_that_are_not_finite_have_no_offsets(tmp_path):
    decoder = make_decoder(tmp_path, float("inf"))
    means = measure_keys(decoder, TEXT, BLOCK)
    assert means == [None] * LAYERS
    before = hidden_states(decoder, "fp8")
    decoder.take_off_keys(means)
    assert torch.equal(hidden_states(decoder, "fp8"), before) or before.isnan().any()


def test_frequencies_that_depend_on_the_length_allow_no_offsets(tmp_path):
    assert measure_keys(make_decoder(tmp_path, 5.0, rope_parameters=DYNAMIC), TEXT, BLOCK) == [None] * LAYERS


def test_a_model_of_few_positions_is_measured_on_those(tmp_path):
    decoder = make_decoder(tmp_path, 2.5, 0.0, max_position_embeddings=5)
    for statistics in measure_keys(decoder, TEXT, BLOCK):
        torch.testing.assert_close(statistics.mean.abs(), torch.full((HEADS, DIM), 2.5))


def test_tables_grow_without_changing(tmp_path):
    decoder = make_decoder(tmp_path)
    means = [known(torch.randn(HEADS, DIM)), None, known(torch.randn(HEADS, DIM))]
    grown, whole = KeyOffsets(decoder.rope, means), KeyOffsets(decoder.rope, means)
    whole.cover(1500)
    for num_positions in (1, 256, 257, 1500, 20):
        grown.cover(num_positions)
    for layer in (0, 2):
        for table, expected in zip(grown.tables(layer), whole.tables(layer), strict=True):
            assert len(expected) == 6
            assert torch.equal(table[:6], expected)
    assert grown.tables(1) == (None, None)


def test_a_cache_with_a_scale_a_token_has_them_measured_once(tmp_path):
    tokenizer = SimpleNamespace(encode_batch=lambda texts: [TEXT for text in texts if len(text) > 4000])
    model = SimpleNamespace(decoder=make_decoder(tmp_path), tokenizer=tokenizer)
    cache_spec(CacheConfig(), model)
    assert not model.decoder.has_key_offsets
    with pytest.raises(UsageError, match="has layers 0 to 2"):
        cache_spec(CacheConfig(kv_cache_dtype="fp8", kv_cache_dtype_skip_layers="3"), model)
    assert not model.decoder.has_key_offsets
    cache_spec(CacheConfig(kv_cache_dtype="fp8"), model)
    assert model.decoder.has_key_offsets
    measured = model.decoder._key_offsets
    cache_spec(CacheConfig(kv_cache_dtype="int8"), model)
    assert model.decoder._key_offsets is measured
