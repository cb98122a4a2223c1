"""The sampler's state by slot: rules reach their own rows only, and the fast path gives the same tokens."""

import math

import numpy as np
import pytest
import torch
from stand_in import make_request

from batchinfer.engine.adjustments import TokenCounts
from batchinfer.engine.device_queue import ImmediateQueue
from batchinfer.engine.sampler import Sampler
from batchinfer.scheduler_output import StartedSequence

VOCAB = 40
QUEUE = ImmediateQueue()


def start(sampler: Sampler, slot: int, prompt: list[int], output: list[int] = (), **params) -> None:
    request = make_request(slot, prompt, 50, **params)
    sampler.start(StartedSequence(slot, request, np.array([*prompt, *output], np.int32), (), 0))


def sample(sampler: Sampler, logits: torch.Tensor, slots: list[int], positions: list[int]):
    """As the model runner does it: plan, choose, take and count."""
    rows = np.array(slots, np.int32)
    plan = sampler.plan(rows, np.array(positions, np.int64), logits.shape[-1])
    taken = plan.take(iter([tensor.numpy() for tensor in plan.choose(logits)]))
    assert set(taken.logprobs) == set(plan.rows_with_logprobs)
    sampler.count(rows, taken.token_ids)
    return taken


@pytest.fixture
def logits() -> torch.Tensor:
    return torch.randn(4, VOCAB, generator=torch.Generator().manual_seed(6)) * 2


def test_rules_reach_only_their_rows_and_logits_stay(logits):
    best = logits.argmax(-1).tolist()
    before = logits.clone()
    sampler = Sampler(8, frozenset({best[2]}), QUEUE)
    start(sampler, 5, [1], logit_bias=((7, 100.0),))
    start(sampler, 1, [best[1]], repetition_penalty=1e6)
    start(sampler, 7, [1], min_tokens=3)
    start(sampler, 2, [1])
    tokens = sample(sampler, logits, [5, 1, 7, 2], [1, 1, 3, 1]).token_ids.tolist()
    assert torch.equal(logits, before)
    assert tokens[0] == 7
    without_best = before[1].clone()
    without_best[best[1]] = -math.inf
    assert tokens[1] == int(without_best.argmax())
    without_eos = before[2].clone()
    without_eos[best[2]] = -math.inf
    assert tokens[2] == int(without_eos.argmax())
    assert tokens[3] == best[3]
    assert sample(sampler, logits[2:3], [7], [4]).token_ids.tolist() == [best[2]]  # min_tokens are there


def test_greedy_and_drawn_rows_mix(logits):
    logits[3, 5:] = -math.inf
    sampler = Sampler(4, frozenset(), QUEUE)
    for slot, temperature in enumerate([0.0, 1.0, 1e-4, 0.7]):
        start(sampler, slot, [1], temperature=temperature, seed=slot)
    for position in range(1, 30):
        sampled = sample(sampler, logits, [0, 1, 2, 3], [position] * 4)
        assert sampled.is_finite.all()
        assert sampled.token_ids[[0, 2]].tolist() == logits[[0, 2]].argmax(-1).tolist()
        assert sampled.token_ids[3] < 5
        assert sample(sampler, logits[1:2], [1], [position]).token_ids[0] == sampled.token_ids[1]


def test_penalties_follow_the_tokens_that_are_sampled():
    """Frequency penalty 1 on logits 0, -0.5, ...: the token whose logit less its count is greatest, lowest id first."""
    row = torch.tensor([[-0.5 * i for i in range(6)]])
    sampler = Sampler(1, frozenset(), QUEUE)
    start(sampler, 0, [0, 0, 0], frequency_penalty=1.0)
    counts, expected, tokens = [0] * 6, [], []
    for position in range(3, 15):
        values = [-0.5 * i - counts[i] for i in range(6)]
        expected.append(values.index(max(values)))
        counts[expected[-1]] += 1
        tokens += sample(sampler, row, [0], [position]).token_ids.tolist()
    assert tokens == expected
    assert len(set(tokens)) > 3


def test_a_preempted_sequence_gets_its_counts_back():
    row = torch.tensor([[1.0, 0.9, 0.0]])
    sampler = Sampler(2, frozenset(), QUEUE)
    start(sampler, 1, [2, 1], output=[0], presence_penalty=0.5)
    assert sample(sampler, row, [1], [3]).token_ids.tolist() == [1]  # 0.5, 0.9: the prompt's token 1 is not penalised
    start(sampler, 1, [2, 1], presence_penalty=0.5)
    assert sample(sampler, row, [1], [2]).token_ids.tolist() == [0]


def test_a_slot_forgets_the_sequence_before(logits):
    best = logits.argmax(-1).tolist()
    sampler = Sampler(1, frozenset(), QUEUE)
    start(sampler, 0, [1], temperature=2.0, logit_bias=((3, 100.0),), logprobs=1, repetition_penalty=2.0, min_tokens=9)
    assert sample(sampler, logits[:1], [0], [1]).token_ids.tolist() == [3]
    sampler.release(0)
    start(sampler, 0, [1])
    sampled = sample(sampler, logits[:1], [0], [1])
    assert sampled.token_ids.tolist() == best[:1]
    assert sampled.logprobs == {}


def test_log_probabilities_are_of_the_raw_logits(logits):
    sampler = Sampler(4, frozenset(), QUEUE)
    start(sampler, 0, [1], logit_bias=((7, 100.0),), logprobs=2)
    start(sampler, 1, [1])
    start(sampler, 2, [1], temperature=1.5, logprobs=0)
    sampled = sample(sampler, logits[:3], [0, 1, 2], [1, 1, 1])
    expected = logits.double().log_softmax(-1)
    assert set(sampled.logprobs) == {0, 2}
    assert sampled.logprobs[0].token_id == 7
    assert sampled.logprobs[0].logprob == pytest.approx(float(expected[0, 7]), abs=1e-5)
    assert [t for t, _ in sampled.logprobs[0].top] == expected[0].topk(2).indices.tolist()
    assert sampled.logprobs[2].top == ()


def test_a_row_with_every_token_barred_is_not_finite(logits):
    sampler = Sampler(2, frozenset(), QUEUE)
    for slot, temperature in enumerate([0.0, 1.0]):
        start(sampler, slot, [1], temperature=temperature, min_tokens=5, stop_token_ids=tuple(range(VOCAB)))
    assert sample(sampler, logits[:2], [0, 1], [1, 1]).is_finite.tolist() == [False, False]


def test_token_counts_grow():
    counts = TokenCounts(np.array([4, 4, 9, 4], np.int32), num_prompt_tokens=3)
    for token_id in [*range(100, 150), 9, 120]:
        counts.add(token_id)
    found = dict(zip(counts.token_ids.tolist(), counts.output_counts.tolist(), strict=True))
    assert found == {4: 1.0, 9: 1.0, **dict.fromkeys(range(100, 150), 1.0), 120: 2.0}
