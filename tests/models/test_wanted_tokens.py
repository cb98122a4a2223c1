"""Only some tokens' hidden states asked for: they and the cache are those of a pass that computes all of them, and the
other rows still tell what the cache must not share."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from tiny_models import make_hf_model, save

from batchinfer.cache.paged_kv import PagedKVCache
from batchinfer.engine.input_builder import build_forward_batch, wanted_tokens
from batchinfer.engine.persistent_batch import StepInputs
from batchinfer.models.loader import load_decoder

BLOCK_SIZE = 4
LENGTHS = [9, 1, 14, 6, 1]  # of contexts
CHUNKS = [5, 1, 14, 3, 1]  # computed last, after the rest


@pytest.fixture(scope="module", autouse=True)
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def inputs_of(starts, stops, seed=0):
    """Sequences whose tokens [start, stop) are computed; each has blocks of its own."""
    rng = np.random.default_rng(seed)
    ids = [rng.integers(0, 97, 64) for _ in starts]
    spans = [np.arange(start, stop) for start, stop in zip(starts, stops, strict=True)]
    table = np.arange(len(starts) * 16, dtype=np.int32).reshape(len(starts), 16)
    return StepInputs(
        token_ids=np.concatenate([tokens[span] for tokens, span in zip(ids, spans, strict=True)]),
        positions=np.concatenate(spans),
        slot_mapping=np.concatenate(
            [row[s // BLOCK_SIZE] * BLOCK_SIZE + s % BLOCK_SIZE for row, s in zip(table, spans, strict=True)]
        ),
        block_table=table,
        cu_seqlens_q=np.cumsum([0, *map(len, spans)], dtype=np.int32),
        seq_lens=np.array(stops, np.int32),
        logits_indices=np.zeros(0, np.int64),
    )


def passes(decoder, cache, last, samples, scores):
    """Hidden states of the last chunks with only some of them wanted, and which these are."""
    starts = [length - chunk for length, chunk in zip(LENGTHS, CHUNKS, strict=True)]
    first = [i for i, start in enumerate(starts) if start]
    everything = inputs_of([0] * len(starts), starts)
    kept = np.concatenate([np.arange(everything.cu_seqlens_q[i], everything.cu_seqlens_q[i + 1]) for i in first])
    before = replace(
        everything,
        token_ids=everything.token_ids[kept],
        positions=everything.positions[kept],
        slot_mapping=everything.slot_mapping[kept],
        block_table=everything.block_table[first],
        cu_seqlens_q=np.cumsum([0, *(starts[i] for i in first)], dtype=np.int32),
        seq_lens=everything.seq_lens[first],
    )
    batch = build_forward_batch(before, before.seq_lens, torch.from_numpy)
    decoder.forward(batch, cache)
    wanted = wanted_tokens(last, np.array(samples), np.array(scores), torch.from_numpy)
    batch = build_forward_batch(last, last.seq_lens, torch.from_numpy, wanted=wanted)
    return decoder.forward(batch, cache), wanted


def last_chunks():
    return inputs_of([length - chunk for length, chunk in zip(LENGTHS, CHUNKS, strict=True)], LENGTHS)


def make_cache(decoder, kv_dtype="auto"):
    return PagedKVCache(decoder.kv_cache_spec(BLOCK_SIZE, kv_dtype), 16 * len(LENGTHS))


SOME = [True, False, False, True, True]
NONE = [False] * 5


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("kv_dtype", ["auto", "fp8"])
@pytest.mark.parametrize(
    ("samples", "scores"), [(SOME, NONE), (NONE, NONE), (SOME, [False, False, True, True, False]), ([True] * 5, NONE)]
)
def test_wanted_rows_and_the_cache_are_those_of_a_whole_pass(tmp_path, dtype, kv_dtype, samples, scores):
    decoder = load_decoder(save(make_hf_model("llama", hidden_size=96, head_dim=16), tmp_path), dtype)
    caches = [make_cache(decoder, kv_dtype) for _ in range(2)]
    whole, nothing = passes(decoder, caches[0], last_chunks(), samples, [True] * 5)
    assert nothing is None
    states, wanted = passes(decoder, caches[1], last_chunks(), samples, scores)
    stops = np.cumsum(CHUNKS)
    expected = [
        token
        for stop, chunk, sample, score in zip(stops, CHUNKS, samples, scores, strict=True)
        for token in range(stop - (chunk if score else int(sample)), stop)
    ]
    assert wanted.tokens.tolist() == expected
    assert torch.equal(states[expected], whole[expected])
    assert states.shape == whole.shape
    assert bool(states.isfinite().all())
    for layer in range(decoder.spec.num_layers):
        for read in (PagedKVCache.key, PagedKVCache.value, PagedKVCache.key_scale):
            pair = [read(cache, layer) for cache in caches]
            assert pair[0] is None or torch.equal(pair[0].view(torch.uint8), pair[1].view(torch.uint8))


def test_a_token_that_breaks_shows_in_its_row_though_it_is_not_wanted(tmp_path):
    model = make_hf_model("llama")
    broken = 6  # of the last chunks' tokens: in the third sequence, whose last token is wanted
    last = last_chunks()
    with torch.no_grad():
        model.model.embed_tokens.weight[last.token_ids[broken]] = float("nan")
    decoder = load_decoder(save(model, tmp_path), "fp32")
    states, _ = passes(decoder, make_cache(decoder), last, [True] * 5, NONE)
    is_finite = states.isfinite().all(-1)
    assert not is_finite[broken]
    own = torch.tensor(last.token_ids == last.token_ids[broken])
    third = torch.tensor((np.arange(len(own)) >= broken) & (np.arange(len(own)) < 20))
    assert is_finite[~own & ~third].all()


def stored_numbers(cache, layer, slots):
    """float32 [num_tokens, numbers and scales] that a layer holds of tokens."""
    found = []
    for token in slots.tolist():
        block, place = divmod(token, BLOCK_SIZE)
        both = [read(cache, layer) for read in (PagedKVCache.key, PagedKVCache.value)]
        scales = [read(cache, layer) for read in (PagedKVCache.key_scale, PagedKVCache.value_scale)]
        rows = [numbers[block, :, place].float().flatten() for numbers in both]
        found.append(torch.cat([*rows, *(scale[block, :, place] for scale in scales if scale is not None)]))
    return torch.stack(found)


@pytest.mark.parametrize("part", ["k", "v"])
@pytest.mark.parametrize(("dtype", "kv_dtype"), [("fp16", "auto"), ("bf16", "fp16"), ("fp16", "fp8_e5m2")])
def test_numbers_that_break_in_the_last_layer_show_in_the_rows_that_hold_them(tmp_path, part, dtype, kv_dtype):
    """The states before it are finite. In float16 some products overflow, and some keys only as they are rotated."""
    model = make_hf_model("llama", hidden_size=96, head_dim=16)
    with torch.no_grad():
        getattr(model.model.layers[-1].self_attn, f"{part}_proj").weight.mul_(3e5)
    decoder = load_decoder(save(model, tmp_path), dtype)
    cache, last = make_cache(decoder, kv_dtype), last_chunks()
    states, _ = passes(decoder, cache, last, NONE, NONE)
    held = stored_numbers(cache, decoder.spec.num_layers - 1, torch.from_numpy(last.slot_mapping))
    is_held_finite = held.isfinite().all(-1)
    assert torch.equal(states.isfinite().all(-1), is_held_finite)
    assert not is_held_finite.all()


def test_what_follows_a_broken_token_in_its_sequence_is_broken_too(tmp_path):
    model = make_hf_model("llama")
    last = last_chunks()
    with torch.no_grad():
        model.model.embed_tokens.weight[last.token_ids[8]] = float("nan")
    decoder = load_decoder(save(model, tmp_path), "fp32")
    states, _ = passes(decoder, make_cache(decoder), last, [True] * 5, NONE)
    assert not states[8:20].isfinite().all(-1).any()
