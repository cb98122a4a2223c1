"""Sequences side by side in one pass: what each gets, and how they are packed."""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch

sys.path.append(str(Path(__file__).parent.parent / "models"))
from tiny_models import SIZES, make_hf_model, save

from batchinfer.cache.paged_kv import PagedKVCache
from batchinfer.engine.whole_sequences import blocks_needed, pack, run_whole
from batchinfer.models.loader import load_decoder


def sequences(*lengths):
    ids = np.random.default_rng(0)
    return [ids.integers(0, SIZES["vocab_size"], length).astype(np.int32) for length in lengths]


@pytest.mark.parametrize(
    ("lengths", "most_tokens", "passes"),
    [
        ([], 10, []),
        ([3, 4, 3, 1], 10, [[3, 4, 3], [1]]),
        ([10, 11, 1], 10, [[10], [11], [1]]),
        ([5, 6], 10, [[5], [6]]),
    ],
)
def test_packing(lengths, most_tokens, passes):
    given = sequences(*lengths)
    packed = list(pack(given, most_tokens))
    assert [[len(one) for one in some] for some in packed] == passes
    assert [one.tolist() for some in packed for one in some] == [one.tolist() for one in given]


def test_each_sequence_gets_what_hugging_face_gives_it_alone(tmp_path):
    model = make_hf_model("llama")
    decoder = load_decoder(save(model, tmp_path))
    given = sequences(1, 4, 9, 64, 17)
    blocks = blocks_needed(given, 4)
    assert blocks == 1 + 1 + 3 + 16 + 5
    cache = PagedKVCache(decoder.kv_cache_spec(4), blocks)
    for _ in range(2):  # what the first pass left is written over
        hidden = run_whole(decoder, cache, given, 4).split([len(one) for one in given])
        for ids, states in zip(given, hidden, strict=True):
            with torch.no_grad():
                expected = model(torch.from_numpy(ids.astype(np.int64))[None]).logits[0]
            torch.testing.assert_close(decoder.compute_logits(states), expected, atol=2e-5, rtol=2e-5)
        given = given[::-1]
