"""Sampling against published vectors, plain formulas in NumPy float64, and statistics."""

import math

import numpy as np
import pytest
import torch
from batchinfer.kernels import sampling
from batchinfer.kernels.sampling import noise as noise_module
from batchinfer.kernels.sampling import reference

# From the file kat_vectors of the Random123 library: counter, key, output of philox4x32 with 10 rounds.
KNOWN_ANSWERS = [
    ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
    ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
    (
        [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
        [0xA4093822, 0x299F31D0],
        [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
    ),
]


def numpy_philox(counter: list[int], key: list[int]) -> list[int]:
    """The paper's definition on Python's integers."""
    c, k = list(counter), list(key)
    for _ in range(10):
        p0, p1 = c[0] * 0xD2511F53, c[2] * 0xCD9E8D57
        c = [(p1 >> 32) ^ c[1] ^ k[0], p1 % 2**32, (p0 >> 32) ^ c[3] ^ k[1], p0 % 2**32]
        k = [(k[0] + 0x9E3779B9) % 2**32, (k[1] + 0xBB67AE85) % 2**32]
    return c


def numpy_gumbel(key: int, position: int, vocab_size: int) -> np.ndarray:
    halves = [key % 2**32, (key >> 32) % 2**32]
    words = [w for group in range((vocab_size + 3) // 4) for w in numpy_philox([group, position, 0, 0], halves)]
    u = np.minimum((np.array(words[:vocab_size], dtype=np.float64) + 0.5) * 2.0**-32, 1 - 2.0**-24)
    return -np.log(-np.log1p(-u))


def softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max())
    return e / e.sum()


def naive_sample(logits, temperature, min_p, top_k, top_p, key, position) -> int:
    """Temperature, then min-p, top-k and top-p each on what the one before left; float64."""
    x = np.asarray(logits, dtype=np.float64) / temperature
    p = softmax(x)
    x = np.where(p < min_p * p.max(), -np.inf, x)
    if top_k:
        x = np.where(x < np.sort(x)[::-1][min(top_k, len(x)) - 1], -np.inf, x)
    if top_p < 1:
        p = softmax(x)
        order = np.argsort(-p, kind="stable")
        before = np.cumsum(p[order]) - p[order]
        x[order[before >= top_p]] = -np.inf
    return int(np.argmax(x + numpy_gumbel(key, position, len(x))))


def rows(n: int, value: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.full((n,), value, dtype=dtype)


def draw(logits, keys, positions, temperature=1.0, min_p=0.0, top_k=0, top_p=1.0, changes=None):
    n = len(logits)
    return sampling.sample(
        logits,
        rows(n, temperature),
        rows(n, min_p),
        rows(n, top_k, torch.int64),
        rows(n, top_p),
        torch.as_tensor(keys, dtype=torch.int64),
        torch.as_tensor(positions, dtype=torch.int64),
        changes,
    )


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN_ANSWERS)
def test_philox_gives_the_published_words(counter, key, expected):
    words = sampling.philox4x32(
        tuple(torch.tensor([c]) for c in counter), (torch.tensor([key[0]]), torch.tensor([key[1]]))
    )
    assert [int(w) for w in words] == expected
    assert numpy_philox(counter, key) == expected


def test_noise_equals_the_numpy_implementation():
    keys = [0, -1, 0x0123456789ABCDEF, -(2**63)]
    positions = [0, 7, 131071, 2**31 - 1]
    noise = sampling.gumbel_noise(torch.tensor(keys), torch.tensor(positions), 101)
    for row, key, position in zip(noise, keys, positions, strict=True):
        np.testing.assert_allclose(row.numpy(), numpy_gumbel(key % 2**64, position, 101), rtol=2e-5, atol=2e-6)


def test_noise_is_finite_for_every_word():
    words = torch.tensor([0, 1, 2**31, 2**32 - 2, 2**32 - 1])
    values = noise_module._to_gumbel(words)
    assert values.isfinite().all()
    assert values[0] == pytest.approx(33 * math.log(2), rel=1e-6)  # -log(2**-33)
    assert values[-1] == pytest.approx(-math.log(24 * math.log(2)), rel=1e-6)


def test_greedy_takes_the_lowest_id_of_a_tie():
    logits = torch.zeros(3, 50_000)
    logits[0, [7, 49_999]] = 2.0
    logits[1, [0, 1]] = 1.0
    token_ids, is_finite = sampling.greedy(logits)
    assert token_ids.tolist() == [7, 0, 0]
    assert is_finite.all()


def test_rows_with_nan_or_infinity_are_flagged_and_others_are_not():
    logits = torch.randn(5, 33, generator=torch.Generator().manual_seed(1))
    healthy = logits.clone()
    logits[1, 5] = math.nan
    logits[2, 0] = math.inf
    logits[3, :] = -math.inf
    logits[4, 1:] = -math.inf
    for choose in (sampling.greedy, lambda x: draw(x, [3] * 5, range(5), 0.7, 0.1, 5, 0.9)):
        token_ids, is_finite = choose(logits)
        assert is_finite.tolist() == [True, False, False, False, True]
        assert token_ids[0] == choose(healthy)[0][0]
        assert token_ids[4] == 0


FILTERS = [
    (1.0, 0.0, 0, 1.0),
    (0.7, 0.0, 0, 0.9),
    (1.3, 0.0, 5, 1.0),
    (0.9, 0.05, 0, 1.0),
    (1.1, 0.02, 12, 0.8),
    (0.5, 1.0, 0, 1.0),
    (1.0, 0.0, 1, 1.0),
    (1.0, 0.0, 10_000, 1e-6),
]


@pytest.mark.parametrize(("temperature", "min_p", "top_k", "top_p"), FILTERS)
def test_tokens_equal_the_naive_sampler(temperature, min_p, top_k, top_p):
    generator = torch.Generator().manual_seed(5)
    logits = torch.randn(12, 97, generator=generator) * 2.5
    keys = torch.randint(-(2**63), 2**63 - 1, (12,), generator=generator)
    token_ids, _ = draw(logits, keys, range(12), temperature, min_p, top_k, top_p)
    expected = [
        naive_sample(logits[i], temperature, min_p, top_k, top_p, int(keys[i]) % 2**64, i) for i in range(len(logits))
    ]
    assert token_ids.tolist() == expected


def test_filters_apply_row_by_row():
    logits = (torch.randn(1, 64, generator=torch.Generator().manual_seed(2)) * 2).repeat(4, 1)
    filters = [(0.8, 0.0, 0, 1.0), (1.5, 0.0, 3, 1.0), (1.0, 0.0, 0, 0.3), (1.2, 0.3, 0, 1.0)]
    temperature, min_p, top_k, top_p = (torch.tensor(column) for column in zip(*filters, strict=True))
    for position in range(20):
        positions = rows(4, position, torch.int64)
        token_ids, _ = sampling.sample(logits.clone(), temperature, min_p, top_k, top_p, torch.arange(4), positions)
        assert token_ids.tolist() == [naive_sample(logits[0], *f, i, position) for i, f in enumerate(filters)]


def test_a_nucleus_wider_than_the_partial_sort_is_cut_exactly():
    vocab = 3000
    logits = torch.linspace(0, -0.3, vocab)[torch.randperm(vocab, generator=torch.Generator().manual_seed(3))]
    keys = torch.arange(40)
    token_ids, _ = draw(logits.repeat(40, 1), keys, [9] * 40, top_p=0.5)
    p = softmax(logits.double().numpy())
    order = np.argsort(-p)
    nucleus = set(order[: int(np.searchsorted(np.cumsum(p[order]), 0.5)) + 1].tolist())
    assert 1024 < len(nucleus) < 1600
    assert set(token_ids.tolist()) <= nucleus
    assert token_ids.tolist()[:4] == [naive_sample(logits, 1.0, 0.0, 0, 0.5, k, 9) for k in range(4)]


def test_tokens_tied_with_the_last_kept_one_are_kept():
    logits = torch.tensor([[3.0, 1.0, 1.0, 1.0, -5.0]]).repeat(400, 1)
    by_top_k = set(draw(logits, range(400), [0] * 400, temperature=2.0, top_k=2)[0].tolist())
    by_top_p = set(draw(logits, range(400), [0] * 400, temperature=2.0, top_p=0.5)[0].tolist())
    assert by_top_k == by_top_p == {0, 1, 2, 3}


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.7])
def test_frequencies_follow_the_softmax(temperature):
    logits = torch.tensor([2.0, 1.0, 0.5, 0.0, -0.5, -1.0, -2.0])
    draws = 20_000
    keys = torch.arange(draws) * 0x9E3779B97F4A7C15 % 2**62
    token_ids, _ = draw(logits.repeat(draws, 1), keys, [3] * draws, temperature)
    observed = np.bincount(token_ids.numpy(), minlength=7)
    expected = draws * softmax(logits.double().numpy() / temperature)
    chi_square = ((observed - expected) ** 2 / expected).sum()
    assert chi_square < 22.46  # 0.999 quantile of chi-square with 6 degrees of freedom


def test_frequencies_over_positions_of_one_key_follow_the_softmax():
    logits = torch.tensor([1.0, 0.0, 0.0, -1.0, 0.5])
    draws = 20_000
    token_ids, _ = draw(logits.repeat(draws, 1), [77] * draws, range(draws))
    observed = np.bincount(token_ids.numpy(), minlength=5)
    expected = draws * softmax(logits.double().numpy())
    assert ((observed - expected) ** 2 / expected).sum() < 18.47  # 0.999 quantile, 4 degrees of freedom


@pytest.mark.parametrize("scale", [1.0, 1e4, 3e38])
def test_the_smallest_temperature_makes_no_nan(scale):
    logits = torch.tensor([[0.3, -1.0, 1.0, -math.inf], [-1.0, -1.0, -0.5, -0.9]]) * scale
    token_ids, is_finite = draw(logits, [1, 2], [0, 0], temperature=1e-3, min_p=0.1, top_k=3, top_p=0.99)
    assert token_ids.tolist() == [2, 2]
    assert is_finite.all()


def test_a_row_does_not_depend_on_its_batch():
    generator = torch.Generator().manual_seed(8)
    logits = torch.randn(5, 49_152, generator=generator) * 3
    keys = torch.randint(-(2**63), 2**63 - 1, (5,), generator=generator)
    for filters in ({}, {"top_p": 0.95}, {"top_k": 50, "min_p": 0.01}):
        together, _ = draw(logits, keys, range(5), **filters)
        alone = [int(draw(logits[i : i + 1], keys[i : i + 1], [i], **filters)[0]) for i in range(5)]
        assert together.tolist() == alone


def tokens_of(*ids_by_row: list[int]) -> sampling.RowTokens:
    offsets = np.cumsum([0, *(len(ids) for ids in ids_by_row)])
    return sampling.RowTokens(torch.tensor(offsets), torch.tensor([token for ids in ids_by_row for token in ids]))


def test_penalties_follow_their_formula():
    logits = torch.tensor([[1.0, 1.0, 1.0, 1.0, 1.0], [2.0, -2.0, 0.5, 0.0, 1.0]])
    before = logits.clone()
    # row 1: token 0 three times in the output, token 1 once, token 2 in the prompt only
    penalties = sampling.Penalties(
        tokens_of([], [0, 1, 2]),
        output_counts=torch.tensor([3.0, 1.0, 0.0]),
        repetition=torch.tensor([9.0, 1.25]),
        presence=torch.tensor([9.0, 0.5]),
        frequency=torch.tensor([9.0, 0.1]),
    )
    reference.apply_changes(logits, torch.arange(2), sampling.LogitChanges(None, penalties, None))
    assert logits[1].tolist() == pytest.approx([2 / 1.25 - 0.3 - 0.5, -2 * 1.25 - 0.1 - 0.5, 0.5 / 1.25, 0.0, 1.0])
    assert torch.equal(logits[0], before[0])


@pytest.mark.parametrize("repetition", [0.0, math.inf])  # what float32 makes of 1e-300 and 1e300
def test_extreme_penalties_and_biases_stay_finite(repetition):
    logits = torch.tensor([[2.0, -2.0, 0.0, 1.0]])
    tokens = tokens_of([0, 1, 2])
    changes = sampling.LogitChanges(
        sampling.Bias(tokens, torch.tensor([math.inf, -math.inf, 0.0])),
        sampling.Penalties(tokens, rows(3, 1.0), rows(1, repetition), rows(1, 0.0), rows(1, 0.0)),
        None,
    )
    for temperature in (0.0, 1e-3):
        token_ids, is_finite = draw(logits, [0], [0], temperature, changes=changes)
        assert is_finite.all()
        assert int(token_ids) in ({0} if repetition == 0 else {0, 3})  # 1e30 / 1e30 is 1, as is the logit of token 3
    reference.apply_changes(logits, torch.arange(1), changes)
    assert logits.isfinite().all()


def test_barred_tokens_are_never_drawn():
    barred = tokens_of(*[[1, 4]] * 300)
    token_ids, is_finite = draw(
        torch.zeros(300, 6), range(300), [0] * 300, changes=sampling.LogitChanges(None, None, barred)
    )
    assert set(token_ids.tolist()) == {0, 2, 3, 5}
    assert is_finite.all()


def test_token_logprobs_equal_float64_log_softmax():
    generator = torch.Generator().manual_seed(4)
    logits = torch.randn(13, 60_000, generator=generator) * 4
    token_ids = torch.randint(0, 60_000, (13,), generator=generator)
    chosen, top_ids, top = sampling.token_logprobs(logits, token_ids, 3)
    expected = logits.double().log_softmax(-1)
    torch.testing.assert_close(chosen.double(), expected[torch.arange(13), token_ids], atol=1e-5, rtol=0)
    assert torch.equal(top_ids, expected.topk(3).indices)
    torch.testing.assert_close(top.double(), expected.topk(3).values, atol=1e-5, rtol=0)
    assert sampling.token_logprobs(logits, token_ids, 0)[1].shape == (13, 0)
