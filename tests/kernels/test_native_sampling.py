"""Native sampling, and its plain-torch specification, against naive float64 over many kinds of rows; and what must not
change a row's token: other rows, threads, strides."""

import math
import random

import numpy as np
import pytest
import torch
from batchinfer.kernels import sampling
from batchinfer.kernels.sampling import cpu, reference
from naive_sampling import Wishes, decisive_choice
from sampled_rows import arguments, random_row, random_wishes

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
BACKENDS = {"native": cpu, "reference": reference}


@pytest.fixture(autouse=True)
def _seeded_on_two_threads():
    before = torch.get_num_threads()
    torch.manual_seed(0)
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("vocab_size", "num_rows"), [(1, 20), (2, 60), (63, 150), (65, 150), (5000, 150)])
def test_tokens_of_random_rows_equal_the_naive_ones(backend, dtype, vocab_size, num_rows):
    rng = random.Random(vocab_size)
    logits = torch.stack([random_row(rng, vocab_size) for _ in range(num_rows)]).to(dtype)
    wishes = [random_wishes(rng, vocab_size) for _ in range(num_rows)]
    keys = torch.randint(-(2**63), 2**63 - 1, (num_rows,))
    positions = torch.randint(0, 100_000, (num_rows,))
    token_ids, is_finite = arguments(logits, wishes, keys, positions, BACKENDS[backend])
    noise = sampling.gumbel_noise(keys, positions, vocab_size).double().numpy()
    expected = [decisive_choice(row, *rest) for row, *rest in zip(logits.double().numpy(), wishes, noise, strict=True)]
    wrong = [
        (row, token, chosen, wishes[row])
        for row, (token, chosen) in enumerate(zip(expected, token_ids.tolist(), strict=True))
        if token not in (None, chosen) and is_finite[row]
    ]
    assert wrong == []
    assert sum(token is None for token, finite in zip(expected, is_finite, strict=True) if finite) < 0.1 * num_rows
    can_choose = [bool(row.isfinite().sum() > len(w.barred)) for row, w in zip(logits, wishes, strict=True)]
    assert all(is_finite[row] for row in range(num_rows) if can_choose[row])


def test_a_flat_nucleus_of_a_large_vocabulary_is_cut_exactly():
    """Probabilities proportional to 1 + rank / vocab in a random order: the nucleus holds over 20,000 tokens."""
    vocab_size, num_draws = 49_152, 300
    weights = 1 + np.random.default_rng(0).permutation(vocab_size) / vocab_size
    logits = torch.tensor(np.log(weights), dtype=torch.float32).repeat(num_draws, 1)
    keys, wishes = torch.arange(num_draws), [Wishes(top_p=0.5)] * num_draws
    token_ids, is_finite = arguments(logits, wishes, keys, keys, cpu)
    falling = np.sort(weights)[::-1]
    num_kept = int(np.searchsorted(np.cumsum(falling) / falling.sum(), 0.5)) + 1
    assert 20_000 < num_kept < 24_000
    assert is_finite.all()
    assert all(weights[token] >= falling[num_kept - 1] for token in token_ids.tolist())
    lower_half = sum(weights[token] < falling[num_kept // 2] for token in token_ids.tolist())
    assert 100 < lower_half < 180  # 46% of 300 expected: the whole nucleus is drawn from


@pytest.mark.parametrize("temperature", [1e-3, 1.0, 50.0])
def test_draws_without_filters_take_the_highest_of_all_sums(temperature):
    logits = torch.randn(60, 20_000) * 4
    keys, positions = torch.randint(-(2**63), 2**63 - 1, (60,)), torch.arange(60)
    token_ids, _ = arguments(logits, [Wishes(temperature)] * 60, keys, positions, cpu)
    sums = logits.double() / temperature + sampling.gumbel_noise(keys, positions, 20_000).double()
    best = sums.topk(2).values
    decisive = best[:, 0] - best[:, 1] > 1e-4
    assert decisive.sum() > 50
    assert torch.equal(token_ids[decisive], sums.argmax(-1)[decisive])


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_row_depends_on_nothing_else(backend):
    """Not on other rows, threads, or the place of its logits in memory; and logits stay as they are."""
    rng = random.Random(3)
    wide = torch.stack([random_row(rng, 3007) for _ in range(40)]).bfloat16()
    logits, before = wide[:, 3:3004], wide.clone()
    wishes = [random_wishes(rng, 3001) for _ in range(40)]
    keys, positions = torch.randint(-(2**63), 2**63 - 1, (40,)), torch.randint(0, 1000, (40,))
    whole = arguments(logits, wishes, keys, positions, BACKENDS[backend])
    for threads in (1, 3):
        torch.set_num_threads(threads)
        again = arguments(logits.contiguous(), wishes, keys, positions, BACKENDS[backend])
        assert torch.equal(again[0], whole[0])
        assert torch.equal(again[1], whole[1])
    for row in range(40):
        one = slice(row, row + 1)
        alone = arguments(logits[one], wishes[one], keys[one], positions[one], BACKENDS[backend])
        assert (int(alone[0]), bool(alone[1])) == (int(whole[0][row]), bool(whole[1][row]))
    assert torch.equal(wide, before)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("wishes", [Wishes(0.0, bias={0: 1.0}), Wishes(0.7), Wishes(1e-3, 0.1, 5, 0.9, barred=(0,))])
def test_rows_that_are_not_finite_are_flagged(backend, wishes):
    logits = torch.randn(6, 200)
    logits[1, 150], logits[2, 3], logits[3] = math.nan, math.inf, -math.inf
    logits[4] = -math.inf
    logits[4, 77] = 0.5
    token_ids, is_finite = arguments(
        logits, [*[wishes] * 5, Wishes(barred=tuple(range(200)))], torch.arange(6), torch.arange(6), BACKENDS[backend]
    )
    assert is_finite.tolist() == [True, False, False, False, True, False]
    assert token_ids[4] == 77
    assert ((token_ids >= 0) & (token_ids < 200)).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_infinite_logit_that_is_barred_is_still_flagged(backend):
    logits = torch.zeros(2, 9)
    logits[0, 4], logits[1, 4] = math.inf, math.nan
    wishes = [Wishes(0.0, barred=(4,)), Wishes(1.0, barred=(4,))]
    assert not arguments(logits, wishes, torch.arange(2), torch.arange(2), BACKENDS[backend])[1].any()


def test_parameters_that_do_not_fit_are_refused():
    one, whole = torch.zeros(1), torch.zeros(1, dtype=torch.int64)
    with pytest.raises(ValueError, match="belongs"):
        sampling.sample(torch.zeros(2, 5), one, one, whole, one, whole, whole)
    with pytest.raises(ValueError, match="int64"):
        sampling.sample(torch.zeros(1, 5), one, one, one, one, whole, whole)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab_size", [1, 1023, 5000])
def test_greedy(dtype, vocab_size):
    logits = torch.randn(70, vocab_size + 3).to(dtype)[:, 1 : vocab_size + 1]  # bf16 and fp16 have ties
    token_ids, is_finite = cpu.greedy(logits)
    values = logits.float().tolist()
    assert token_ids.tolist() == [row.index(max(row)) for row in values]
    assert is_finite.all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("place", [0, 1500, 2999])
def test_greedy_of_rows_that_are_not_finite(dtype, place):
    logits = torch.randn(6, 3000).to(dtype)
    logits[1, place] = math.nan
    logits[2, place] = math.inf
    logits[3] = -math.inf
    logits[4] = -math.inf
    logits[4, place] = -7.0
    logits[5, place] = -math.inf
    token_ids, is_finite = cpu.greedy(logits)
    assert is_finite.tolist() == [True, False, False, False, True, True]
    assert token_ids[4] == place
    assert ((token_ids >= 0) & (token_ids < 3000)).all()
