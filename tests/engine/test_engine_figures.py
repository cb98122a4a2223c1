"""Latencies of a request against NumPy's percentiles; prompt scores in chunks against one log-softmax."""

from array import array

import numpy as np
import pytest
import torch
from stand_in import make_request

from batchinfer.engine.prompt_scores import PromptScores, score_tokens
from batchinfer.engine.stats import request_times, token_gaps_ms
from batchinfer.sequence import Sequence


@pytest.mark.parametrize("num_tokens", [2, 3, 4, 11, 100, 257])
def test_times_equal_numpy(num_tokens):
    moments = 7.0 + np.cumsum(np.random.default_rng(num_tokens).exponential(0.05, num_tokens))
    sequence = Sequence(make_request(0, [1], 300), 5.0, first_scheduled_time=6.5)
    sequence.token_times = array("d", moments)
    times = request_times(sequence, token_gaps_ms(sequence.token_times), moments[-1])
    gaps = np.diff(moments) * 1e3
    assert times.queue_ms == pytest.approx(1500)
    assert times.ttft_ms == pytest.approx((moments[0] - 5) * 1e3)
    assert times.ttft_ms == pytest.approx(times.queue_ms + times.prefill_ms)
    assert times.tbt_mean_ms == pytest.approx(gaps.mean())
    assert times.tbt_p50_ms == pytest.approx(np.percentile(gaps, 50))
    assert times.tbt_p99_ms == pytest.approx(np.percentile(gaps, 99))
    assert times.tbt_max_ms == pytest.approx(gaps.max())
    assert times.latency_ms == pytest.approx((moments[-1] - 5) * 1e3)


def test_one_token_has_no_gaps():
    sequence = Sequence(make_request(0, [1], 1), 0.0, first_scheduled_time=1.0)
    sequence.token_times.append(3.0)
    times = request_times(sequence, token_gaps_ms(sequence.token_times), 3.0)
    assert (times.prefill_ms, times.ttft_ms) == (2000, 3000)
    assert (times.tbt_mean_ms, times.tbt_p50_ms, times.tbt_p99_ms, times.tbt_max_ms) == (None,) * 4


def test_prompt_scores_take_each_position_once():
    scores = PromptScores(7)
    scores.add(0, np.array([1, 2, 3], np.float32))
    scores.add(0, np.array([9, 9], np.float32))  # computed again after a preemption
    scores.add(2, np.array([9, 4, 5], np.float32))
    with pytest.raises(RuntimeError, match="5 of 6"):
        scores.result()
    scores.add(5, np.array([6], np.float32))
    result = scores.result()
    assert (result.sum, result.count, result.per_token.tolist()) == (21, 6, [1, 2, 3, 4, 5, 6])


def test_prompt_logits_are_made_a_few_rows_at_a_time():
    vocab, hidden_size, rows = 100_000, 8, 100
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(hidden_size, vocab, generator=generator)
    hidden = torch.randn(rows, hidden_size, generator=generator)
    token_ids = torch.randint(0, vocab, (rows,), generator=generator)
    sizes = []

    def compute_logits(chunk: torch.Tensor) -> torch.Tensor:
        sizes.append(len(chunk))
        return chunk @ weight

    values = score_tokens(compute_logits, hidden, token_ids, vocab)
    expected = (hidden.double() @ weight.double()).log_softmax(-1)[torch.arange(rows), token_ids]
    torch.testing.assert_close(values.double(), expected, atol=1e-4, rtol=0)
    assert max(sizes) * vocab <= 2**22
    assert sum(sizes) == rows
