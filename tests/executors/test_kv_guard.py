"""The KV guard on tiny models: one whose keys an 8-bit cache can hold, and one with a layer whose keys it cannot."""

import sys
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import torch

sys.path.append(str(Path(__file__).parent.parent / "models"))
from tiny_models import SIZES, make_hf_model, save

from batchinfer.cache.paged_kv import PagedKVCache
from batchinfer.engine.whole_sequences import blocks_needed, run_whole
from batchinfer.executors import kv_guard
from batchinfer.executors.kv_guard import KL_BOUND, GuardFigures, guard_kv_cache, layers_by_harm, wide_layers_of
from batchinfer.models.loader import load_decoder

LAYERS, WORST = 4, 2
BLOCK = 4


def prompts(*lengths):
    ids = np.random.default_rng(0)
    return [ids.integers(0, SIZES["vocab_size"], length).astype(np.int32) for length in lengths]


PROMPTS = prompts(40, 12, 61)


def make_decoder(path, outliers=0.0):
    """A model with biases on its keys; `outliers` is added to those of some channels of layer WORST. Rotated, they are
    of other size at each position, so no scale suits a key's other channels as well."""
    model = make_hf_model("qwen2", num_hidden_layers=LAYERS, initializer_range=0.1)
    with torch.no_grad():
        model.model.layers[WORST].self_attn.k_proj.bias[::5] += outliers
    return load_decoder(save(model, path))


@pytest.fixture(scope="module")
def benign(tmp_path_factory):
    return make_decoder(tmp_path_factory.mktemp("benign"))


@pytest.fixture(scope="module")
def faulty(tmp_path_factory):
    return make_decoder(tmp_path_factory.mktemp("faulty"), 1000.0)


def guard(decoder, dtype, is_strict, given=PROMPTS):
    lines = []
    return guard_kv_cache(decoder, decoder.kv_cache_spec(BLOCK, dtype), given, is_strict, lines.append), lines


def kl_divergence(decoder, dtype, wide_layers, given=PROMPTS):
    """The mean over all tokens, in float64, from the logits of each prompt run by itself."""

    def logprobs(spec):
        cache = PagedKVCache(spec, blocks_needed(given, BLOCK))
        hidden = [run_whole(decoder, cache, [prompt], BLOCK) for prompt in given]
        return decoder.compute_logits(torch.cat(hidden)).double().log_softmax(-1)

    p, q = (logprobs(decoder.kv_cache_spec(BLOCK, *rest)) for rest in (["auto"], [dtype, wide_layers]))
    return float((p.exp() * (p - q)).sum(-1).mean())


@pytest.mark.parametrize("dtype", ["fp8", "int8"])
@pytest.mark.parametrize("is_strict", [False, True])
def test_a_benign_model_passes(benign, dtype, is_strict):
    outcome, lines = guard(benign, dtype, is_strict)
    assert (outcome.rows, outcome.tokens, outcome.kv_cache_dtype, outcome.wide_layers) == (3, 113, dtype, ())
    assert outcome.before == outcome.after
    assert outcome.after.kl_divergence == pytest.approx(kl_divergence(benign, dtype, ()), rel=1e-3, abs=1e-7)
    assert 0 < outcome.after.kl_divergence < KL_BOUND
    (line,) = lines
    assert line.startswith(f"KV guard: {dtype} against fp32 KV on 113 tokens of 3 rows: KL divergence ")


# Bounds to the measure of so small a model: above what its other layers do to it, below what the outliers do.
SMALL_BOUNDS = [("fp8", 1.5e-3), ("int8", 1.5e-4)]


@pytest.mark.parametrize(("dtype", "bound"), SMALL_BOUNDS)
def test_outliers_are_warned_of(faulty, benign, dtype, bound, monkeypatch):
    monkeypatch.setattr(kv_guard, "KL_BOUND", bound)
    outcome, lines = guard(faulty, dtype, is_strict=False)
    assert outcome.after.kl_divergence == pytest.approx(kl_divergence(faulty, dtype, ()), rel=1e-2)
    assert outcome.after.kl_divergence > bound
    assert outcome.wide_layers == ()
    (line,) = lines
    assert line.startswith("warning: KV guard: ")
    assert "--kv-guard strict" in line
    assert guard(benign, dtype, is_strict=False)[0].after.is_within_bound


@pytest.mark.parametrize(("dtype", "bound"), SMALL_BOUNDS)
def test_strict_keeps_the_layer_with_the_outliers_and_no_other(faulty, dtype, bound, monkeypatch):
    monkeypatch.setattr(kv_guard, "KL_BOUND", bound)
    outcome, lines = guard(faulty, dtype, is_strict=True)
    assert outcome.wide_layers == (WORST,)
    assert outcome.before.kl_divergence > bound >= outcome.after.kl_divergence
    assert outcome.after.kl_divergence == pytest.approx(kl_divergence(faulty, dtype, (WORST,)), rel=2e-2)
    assert "with layers 2 in fp32" in lines[-1]
    assert wide_layers_of(outcome.to_json()) == (WORST,)


def test_layers_that_the_options_keep_already_are_not_named_again(faulty):
    spec = faulty.kv_cache_spec(BLOCK, "int8", (WORST,))
    outcome = guard_kv_cache(faulty, spec, PROMPTS, True, lambda line: None)
    assert outcome.wide_layers == ()
    assert outcome.before.kl_divergence == pytest.approx(kl_divergence(faulty, "int8", (WORST,)), rel=2e-2)
    assert {layer for _, layer in layers_by_harm(faulty, spec, PROMPTS)} == {0, 1, 3}


@pytest.fixture(scope="module")
def big_keys(tmp_path_factory):
    """Of Qwen2.5's class: in the first and the last layer biases take single channels of the keys to hundreds, which
    the queries meet; and logits are as sharp as a trained model's."""
    sizes = {"hidden_size": 128, "num_attention_heads": 4, "intermediate_size": 192, "max_position_embeddings": 256}
    model = make_hf_model("qwen2", num_hidden_layers=LAYERS, initializer_range=0.15, **sizes)
    with torch.no_grad():
        for layer in (model.model.layers[0], model.model.layers[-1]):
            layer.self_attn.k_proj.bias[::8] += 300
            layer.self_attn.k_proj.bias[4::8] -= 300
            layer.self_attn.q_proj.bias[1::2] += 0.5
        model.lm_head.weight *= 3
    return load_decoder(save(model, tmp_path_factory.mktemp("big")))


@pytest.mark.parametrize("dtype", ["fp8", "int8"])
def test_keys_in_the_hundreds_are_warned_of_and_strict_brings_them_within_the_bound(big_keys, dtype):
    """A conversation of several turns, at the bound that jobs have."""
    given = prompts(180, 60)
    outcome, lines = guard(big_keys, dtype, False, given)
    assert outcome.after.kl_divergence == pytest.approx(kl_divergence(big_keys, dtype, (), given), rel=1e-2)
    assert outcome.after.kl_divergence > 1
    assert lines[0].startswith("warning: KV guard: ")
    outcome, _ = guard(big_keys, dtype, True, given)
    assert 0 in outcome.wide_layers
    assert len(outcome.wide_layers) < LAYERS
    assert kl_divergence(big_keys, dtype, outcome.wide_layers, given) < KL_BOUND


class AdditiveTrial:
    """Stands in for prompts of a model on which the divergence adds up over the layers in 8 bits."""

    HARM = (0.01, 0.04, 0.002, 0.03, 0.02)
    decoder = spec = None
    prompts: ClassVar = PROMPTS

    def __init__(self, *_):
        self.narrow_layers = range(len(self.HARM))

    def figures(self, wide_layers):
        return GuardFigures(sum(h for layer, h in enumerate(self.HARM) if layer not in wide_layers), 0.0, 1.0)


@pytest.mark.parametrize(
    ("bound", "layers"),
    [(0.0, (0, 1, 2, 3, 4)), (0.0119, (0, 1, 3, 4)), (0.0121, (1, 3, 4)), (0.033, (1, 3)), (0.063, (1,)), (0.1, (1,))],
)
def test_no_more_layers_than_the_bound_needs(bound, layers, monkeypatch):
    monkeypatch.setattr(kv_guard, "_Trial", AdditiveTrial)
    monkeypatch.setattr(kv_guard, "KL_BOUND", bound)
    assert kv_guard._fewest_layers(AdditiveTrial()) == layers


def test_rows_whose_numbers_are_not_finite_anyway_do_not_count(tmp_path):
    decoder = make_decoder(tmp_path)
    decoder._embedding.weight[5] = torch.nan
    clean = [np.where(ids == 5, 6, ids).astype(np.int32) for ids in PROMPTS]
    bad = np.array([1, 5, 2], np.int32)
    outcome, _ = guard(decoder, "fp8", False, [clean[0], bad, clean[1]])
    assert (outcome.rows, outcome.tokens) == (2, 52)
    outcome, lines = guard(decoder, "fp8", False, [bad])
    assert outcome is None
    assert lines == ["KV guard: there is no row to compare"]
    assert guard(decoder, "fp8", False, [])[0] is None


def test_nan_of_the_8_bit_cache_alone_is_beyond_any_bound():
    from batchinfer.engine.divergence import Divergence

    figures = GuardFigures.of(Divergence(np.array([0.0, np.nan], np.float32), np.array([True, False])))
    assert not figures.is_within_bound
    assert 1e38 < figures.kl_divergence < np.inf  # which JSON holds
    assert figures.top1_agreement == 0.5


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["fp8", "int8"])
def test_the_default_model_bears_8_bits_over_several_turns(smollm2, dtype):
    from batchinfer.data.tokenizer import Tokenizer

    turns = [
        ("user", "Name the planets of the solar system, the nearest to the sun first, and say a word about each."),
        (
            "assistant",
            "Mercury is small, Venus hot, Earth ours, Mars red, Jupiter large, Saturn ringed, Uranus tilted.",
        ),
        ("user", "One is missing. Which is it, who found it, and how far is it from the sun in kilometres?"),
        (
            "assistant",
            "Neptune, found by Galle in 1846 where Le Verrier had computed it to be: 4.5 billion kilometres.",
        ),
        ("user", "How long does light take from the sun to there? Show the arithmetic step by step, please."),
    ]
    messages = [{"role": role, "content": content} for role, content in turns]
    tokenizer = Tokenizer.load(smollm2)
    chats = [tokenizer.apply_chat_template(messages[:length]) for length in (1, 3, 5)]
    given = tokenizer.encode_batch(chats, add_special_tokens=False)
    decoder = load_decoder(smollm2)
    outcome, lines = guard(decoder, dtype, False, given)
    assert not lines[0].startswith("warning")
    assert kl_divergence(decoder, dtype, (), given) < KL_BOUND
    assert outcome.after.top1_agreement > 0.9
