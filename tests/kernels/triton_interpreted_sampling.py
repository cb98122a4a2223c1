"""The sampling kernels against naive float64 and the published noise, under Triton's interpreter as
triton_interpreted.py is."""

import math
import random

import pytest
import torch
import triton
import triton.language as tl
from batchinfer.kernels import sampling
from batchinfer.kernels.sampling import gpu, gpu_noise
from naive_sampling import Wishes, decisive_choice
from sampled_rows import arguments, random_row, random_wishes


@pytest.fixture(autouse=True)
def _small_sizes_and_poisoned_outputs(monkeypatch):
    """Sizes that make rows of a few hundred tokens many tiles, blocks and more candidates than there is room for."""
    for name, size in {"_TILE": 8, "_BLOCK": 64, "_SEARCHED": 32, "_MOST": 32}.items():
        monkeypatch.setattr(gpu, name, size)
    empty = torch.empty

    def poisoned(*shape, **options):
        tensor = empty(*shape, **options)
        return tensor.fill_(math.nan) if tensor.is_floating_point() else tensor.fill_(1)

    monkeypatch.setattr(torch, "empty", poisoned)
    torch.manual_seed(0)


def check_random_rows(dtype, vocab_size, num_rows):
    rng = random.Random(vocab_size)
    logits = torch.stack([random_row(rng, vocab_size) for _ in range(num_rows)]).to(dtype)
    wishes = [random_wishes(rng, vocab_size) for _ in range(num_rows)]
    keys, positions = torch.randint(-(2**63), 2**63 - 1, (num_rows,)), torch.randint(0, 100_000, (num_rows,))
    token_ids, is_finite = arguments(logits, wishes, keys, positions, gpu)
    noise = sampling.gumbel_noise(keys, positions, vocab_size).double().numpy()
    expected = [decisive_choice(row, *rest) for row, *rest in zip(logits.double().numpy(), wishes, noise, strict=True)]
    wrong = [
        (row, token, chosen, wishes[row])
        for row, (token, chosen) in enumerate(zip(expected, token_ids.tolist(), strict=True))
        if token not in (None, chosen) and is_finite[row]
    ]
    assert wrong == []
    can_choose = [bool(row.isfinite().sum() > len(w.barred)) for row, w in zip(logits, wishes, strict=True)]
    assert all(is_finite[row] for row in range(num_rows) if can_choose[row])


def test_tokens_of_random_rows_equal_the_naive_ones():
    check_random_rows(torch.float32, 300, 14)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("vocab_size", "num_rows"), [(1, 10), (2, 20), (63, 60), (64, 20), (700, 60)])
def test_tokens_of_more_random_rows_equal_the_naive_ones(dtype, vocab_size, num_rows):
    check_random_rows(dtype, vocab_size, num_rows)


FLAT = [Wishes(top_p=0.5), Wishes(top_k=150), Wishes(top_k=150, top_p=0.4), Wishes(5.0, top_k=20, top_p=0.9)]


@pytest.mark.parametrize("wishes", [*FLAT, Wishes(top_p=0.999), Wishes(min_p=0.9, top_k=299)])
def test_cuts_among_more_logits_than_there_is_room_for_are_exact(wishes):
    """Nearly flat rows, of which far more than _MOST tokens are kept: the lowest kept logit is what sorting gives."""
    logits = torch.linspace(0, -0.3, 300)[torch.randperm(300)].repeat(1, 1)
    cut = captured_cuts(logits, wishes)[0]
    scaled = (logits[0] - logits.max()) / wishes.temperature
    kept = scaled[scaled >= (math.log(wishes.min_p) if wishes.min_p else -math.inf)].sort(descending=True).values
    kept = kept[: wishes.top_k or None]
    shares = kept.double().softmax(-1).cumsum(-1)
    assert cut == kept[int((shares < wishes.top_p).sum())] if wishes.top_p < 1 else cut <= kept[-1]
    assert (scaled >= cut).sum() == ((shares < wishes.top_p).sum() + 1 if wishes.top_p < 1 else len(kept))


def captured_cuts(logits, wishes):
    """What find_cuts leaves, which no public function returns."""
    cuts = []
    draw = gpu._draw
    gpu._draw = {(len(logits), -(-logits.shape[1] // gpu._BLOCK)): lambda *x, **_: cuts.append(x[4][1].clone())}
    try:
        rows = torch.arange(len(logits))
        arguments(logits, [wishes] * len(logits), rows, rows, gpu)
    finally:
        gpu._draw = draw
    return cuts[0]


@pytest.mark.parametrize("wishes", [Wishes(0.0, bias={0: 1.0}), Wishes(1e-3, 0.1, 5, 0.9, barred=(0,))])
def test_rows_that_are_not_finite_are_flagged(wishes):
    logits = torch.randn(6, 200)
    logits[1, 150], logits[2, 3], logits[3] = math.nan, math.inf, -math.inf
    logits[4] = -math.inf
    logits[4, 77] = 0.5
    token_ids, is_finite = arguments(
        logits, [*[wishes] * 5, Wishes(barred=tuple(range(200)))], torch.arange(6), torch.arange(6), gpu
    )
    assert is_finite.tolist() == [True, False, False, False, True, False]
    assert token_ids[4] == 77
    assert ((token_ids >= 0) & (token_ids < 200)).all()


def test_an_infinite_logit_that_is_barred_is_still_flagged():
    logits = torch.zeros(3, 70)
    logits[0, 4], logits[1, 4] = math.inf, math.nan
    wishes = [Wishes(0.0, barred=(4,)), Wishes(1.0, barred=(4,)), Wishes(0.0, barred=(0,))]
    token_ids, is_finite = arguments(logits, wishes, torch.arange(3), torch.arange(3), gpu)
    assert is_finite.tolist() == [False, False, True]
    assert token_ids[2] == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("vocab_size", [1, 63, 300])
def test_greedy(dtype, vocab_size):
    logits = torch.randn(5, vocab_size + 3).to(dtype)[:, 1 : vocab_size + 1]
    logits[0] = 1.0  # the lowest id of a tie
    token_ids, is_finite = gpu.greedy(logits)
    values = logits.float().tolist()
    assert token_ids.tolist() == [row.index(max(row)) for row in values]
    assert is_finite.all()
    logits[1:, -1] = torch.tensor([math.nan, math.inf, -math.inf, 2000.0])
    logits[3] = -math.inf
    assert gpu.greedy(logits)[1].tolist() == [True, False, False, False, True]


def test_a_row_depends_on_nothing_else():
    """Not on other rows nor on the place of its logits in memory; and logits stay as they are."""
    rng = random.Random(3)
    wide = torch.stack([random_row(rng, 130) for _ in range(8)])
    logits, before = wide[:, 3:104], wide.clone()
    wishes = [random_wishes(rng, 101) for _ in range(8)]
    keys, positions = torch.randint(-(2**63), 2**63 - 1, (8,)), torch.randint(0, 1000, (8,))
    whole = arguments(logits, wishes, keys, positions, gpu)
    for row in range(0, 8, 2):
        one = slice(row, row + 1)
        alone = arguments(logits[one].contiguous(), wishes[one], keys[one], positions[one], gpu)
        assert (int(alone[0]), bool(alone[1])) == (int(whole[0][row]), bool(whole[1][row]))
    assert torch.equal(wide, before)


def test_no_rows():
    nothing = torch.zeros(0)
    token_ids, is_finite = gpu.greedy(torch.zeros(0, 7))
    assert len(token_ids) == len(is_finite) == 0
    whole = nothing.long()
    assert len(gpu.sample(torch.zeros(0, 7), nothing, nothing, whole, nothing, whole, whole, None)[0]) == 0


@triton.jit
def _noise(out_ptr, words_ptr, draw_ptr, first_group, GROUPS: tl.constexpr):
    at = tl.arange(0, 4 * GROUPS)
    if words_ptr is None:
        tl.store(out_ptr + at, gpu_noise.noise_of(tl.load(draw_ptr), tl.load(draw_ptr + 1), first_group, GROUPS))
    else:
        tl.store(out_ptr + at, gpu_noise.gumbel(tl.load(words_ptr + at).to(tl.uint32)))


def test_noise_equals_the_plain_one():
    for key, position in ((0, 0), (-1, 7), (0x0123456789ABCDEF, 131071), (-(2**63), 2**31 - 1)):
        out = torch.empty(64)
        _noise[(1,)](out, None, torch.tensor([key, position]), 5, GROUPS=16)
        expected = sampling.gumbel_noise(torch.tensor([key]), torch.tensor([position]), 84)[0, 20:]
        torch.testing.assert_close(out, expected, rtol=2e-6, atol=5e-7)


def test_noise_is_exact_for_the_words_at_both_ends():
    """Where 1 - u rounds to 1, and where u does."""
    words = torch.tensor([0, 1, 2, 1000, 2**31, 2**32 - 2, 2**32 - 1, 12345678]).long()
    out = torch.empty(8)
    _noise[(1,)](out, words, None, 0, GROUPS=2)
    u = ((words.double() + 0.5) * 2.0**-32).clamp(max=1 - 2.0**-24)
    torch.testing.assert_close(out.double(), -torch.log(-torch.log1p(-u)), rtol=2e-6, atol=5e-7)
