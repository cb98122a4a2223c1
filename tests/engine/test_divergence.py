"""Divergence and scores against the definitions in float64, whatever the chunks."""

import numpy as np
import pytest
import torch

from batchinfer.engine import divergence


class Head:
    """Logits are the hidden states times a matrix."""

    vocab_size = 11

    def __init__(self, seed: int) -> None:
        self.weight = torch.randn(5, self.vocab_size, generator=torch.Generator().manual_seed(seed))

    def compute_logits(self, hidden):
        return hidden @ self.weight


def log_softmax(head, hidden):
    logits = hidden.double().numpy() @ head.weight.double().numpy()
    return logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))


@pytest.mark.parametrize(("rows", "block_rows"), [(1, 1), (4, 3), (5, 2), (99, 99), (0, 0)])
def test_scores_and_divergence(rows, block_rows, monkeypatch):
    monkeypatch.setattr(divergence, "_ELEMENTS", rows * Head.vocab_size)
    monkeypatch.setattr(divergence, "_BLOCK_ELEMENTS", block_rows * Head.vocab_size)
    noise = torch.Generator().manual_seed(9)
    hidden, reference_hidden = torch.randn(2, 7, 5, generator=noise)
    targets = torch.tensor([0, 10, 3, 3, 5, 1, 2])
    head, reference_head = Head(1), Head(2)
    q, p = log_softmax(head, hidden), log_softmax(reference_head, reference_hidden)
    scores, reference_scores, found = divergence.score_against(head, hidden, reference_head, reference_hidden, targets)
    np.testing.assert_allclose(scores, q[np.arange(7), targets], rtol=1e-5)
    np.testing.assert_allclose(reference_scores, p[np.arange(7), targets], rtol=1e-5)
    np.testing.assert_allclose(found.kl, (np.exp(p) * (p - q)).sum(axis=1), rtol=1e-4)
    assert found.same_top.tolist() == (p.argmax(axis=1) == q.argmax(axis=1)).tolist()
    assert found.mean_kl == pytest.approx(found.kl.mean())
    assert found.top1_agreement == sum(found.same_top) / 7
    np.testing.assert_array_equal(divergence.score(head, hidden, targets), scores)
    other = log_softmax(head, reference_hidden)
    same_head = divergence.compare(head, hidden, reference_hidden)
    np.testing.assert_allclose(same_head.kl, (np.exp(other) * (other - q)).sum(axis=1), rtol=1e-4)


def test_no_divergence_from_itself_and_nan_shows():
    hidden = torch.randn(4, 5, generator=torch.Generator().manual_seed(3))
    assert divergence.compare(Head(1), hidden, hidden).kl.tolist() == [0] * 4
    broken = hidden.clone()
    broken[2] = torch.nan
    assert np.isnan(divergence.compare(Head(1), broken, hidden).kl).tolist() == [False, False, True, False]
