"""A forward pass that only gives the states of each sequence's last token: they and the KV cache are those of a whole
pass, bit for bit, and faults in the tokens before still show."""

import math
import sys
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).parent))
from tiny_models import Runner, make_hf_model, save

from batchinfer.models.loader import load_decoder


@pytest.fixture(autouse=True)
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def random_ids(count, seed):
    return torch.randint(0, 96, (count,), generator=torch.Generator().manual_seed(seed))


A, B = random_ids(40, 1), random_ids(33, 2)
STEPS = [[("a", A, 0, 17), ("b", B, 0, 1)], [("b", B, 1, 32), ("a", A, 17, 18)], [("a", A, 18, 40), ("b", B, 32, 33)]]


@pytest.mark.parametrize("kv_dtype", ["auto", "fp8", "int8"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize(
    ("model_type", "fields"), [("llama", {}), ("qwen3", {"head_dim": 16}), ("llama", {"num_hidden_layers": 1})]
)
def test_states_and_cache_are_those_of_a_whole_pass(tmp_path, model_type, fields, dtype, kv_dtype):
    decoder = load_decoder(save(make_hf_model(model_type, **fields), tmp_path), dtype)
    assert decoder.drops_rows
    whole, last = Runner(decoder, kv_dtype), Runner(decoder, kv_dtype)
    for chunks in STEPS:
        ends = torch.tensor([end - start for _, _, start, end in chunks]).cumsum(0)
        states = torch.cat(whole.step(chunks))
        assert torch.equal(last.pass_(chunks, last_rows=ends - 1), states[ends - 1])
    for layer in range(decoder.spec.num_layers):
        for of in ("key", "value"):
            one, other = (getattr(runner.cache, of)(layer).view(torch.uint8) for runner in (whole, last))
            assert torch.equal(one, other)


def test_a_fault_in_an_earlier_token_shows_in_the_last(tmp_path):
    decoder = load_decoder(save(make_hf_model("llama"), tmp_path), "fp32")
    decoder._embedding[96] = math.nan
    bad = A.clone()
    bad[11] = 96
    states = Runner(decoder).pass_([("bad", bad, 0, 40), ("good", B, 0, 33)], last_rows=torch.tensor([39, 72]))
    assert states.isfinite().all(dim=1).tolist() == [False, True]


def test_a_window_would_hide_it(tmp_path):
    assert not load_decoder(save(make_hf_model("mistral", sliding_window=5), tmp_path), "fp32").drops_rows
