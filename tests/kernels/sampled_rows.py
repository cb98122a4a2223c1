"""Rows of logits and what they ask for, drawn at random, for the tests of sampling's backends."""

import math
import random

import numpy as np
import torch
from batchinfer.kernels import sampling
from naive_sampling import Wishes


def row_tokens(ids_by_row) -> sampling.RowTokens:
    offsets = np.cumsum([0, *(len(ids) for ids in ids_by_row)])
    return sampling.RowTokens(
        torch.tensor(offsets), torch.tensor([i for ids in ids_by_row for i in ids], dtype=torch.int64)
    )


def changes_of(wishes: list[Wishes]) -> sampling.LogitChanges:
    bias = torch.tensor([b for w in wishes for b in w.bias.values()])
    counts = torch.tensor([float(c) for w in wishes for c in w.output_counts.values()])
    factors = torch.tensor([(w.repetition, w.presence, w.frequency) for w in wishes]).T.contiguous()
    return sampling.LogitChanges(
        sampling.Bias(row_tokens([w.bias for w in wishes]), bias),
        sampling.Penalties(row_tokens([w.output_counts for w in wishes]), counts, *factors),
        row_tokens([w.barred for w in wishes]),
    )


def arguments(logits: torch.Tensor, wishes: list[Wishes], keys: torch.Tensor, positions: torch.Tensor, backend):
    floats = [torch.tensor([getattr(w, name) for w in wishes]) for name in ("temperature", "min_p", "top_p")]
    top_k = torch.tensor([w.top_k for w in wishes], dtype=torch.int64)
    return backend.sample(logits, floats[0], floats[1], top_k, floats[2], keys, positions, changes_of(wishes))


def random_wishes(rng: random.Random, vocab_size: int) -> Wishes:
    def some_tokens():
        return rng.sample(range(vocab_size), rng.choice([0, 0, min(vocab_size - 1, 3), min(vocab_size - 1, 300)]))

    return Wishes(
        temperature=rng.choice([0.0, 1e-3, 0.3, 0.8, 1.0, 1.0, 5.0]),
        min_p=rng.choice([0.0, 0.0, 0.01, 0.2, 1.0]),
        top_k=rng.choice([0, 0, 1, 2, 50, 700, vocab_size, 10 * vocab_size]),
        top_p=rng.choice([1.0, 1.0, 0.95, 0.5, 0.999, 1e-6]),
        bias={token: rng.uniform(-8, 8) for token in some_tokens()},
        output_counts={token: rng.choice([0, 1, 4]) for token in some_tokens()},
        repetition=rng.choice([1.0, 1.3, 0.7]),
        presence=rng.choice([0.0, 0.5]),
        frequency=rng.choice([0.0, 0.2, -0.1]),
        barred=tuple(some_tokens()),
    )


def random_row(rng: random.Random, vocab_size: int) -> torch.Tensor:
    """Ordinary logits, coarse ones with many ties, constant ones, ones with holes, and a lone peak."""
    row = torch.randn(vocab_size) * rng.choice([0.1, 3.0, 30.0])
    kind = rng.randrange(5)
    if kind == 1:
        row = (row * 2).round() / 2
    if kind == 2:
        row = torch.full((vocab_size,), rng.uniform(-40, 40))
    if kind == 3:
        row[torch.rand(vocab_size) < 0.9] = -math.inf
        row[rng.randrange(vocab_size)] = 1.0
    if kind == 4:
        row[rng.randrange(vocab_size)] += 200
    return row
