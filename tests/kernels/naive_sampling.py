"""Sampling one row at a time in NumPy float64, by its rules as they are told, for the tests of the operation."""

from dataclasses import dataclass, field, replace

import numpy as np


@dataclass(frozen=True)
class Wishes:
    """What one row asks for; output_counts: of each token of its prompt or output. Biased and penalised logits are kept
    within 1e30, -inf included."""

    temperature: float = 1.0
    min_p: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    bias: dict[int, float] = field(default_factory=dict)
    output_counts: dict[int, int] = field(default_factory=dict)
    repetition: float = 1.0
    presence: float = 0.0
    frequency: float = 0.0
    barred: tuple[int, ...] = ()


def softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max())
    return e / e.sum()


def changed(logits: np.ndarray, wishes: Wishes) -> np.ndarray:
    x = np.array(logits, np.float64)
    for token, bias in wishes.bias.items():
        x[token] = np.clip(x[token] + bias, -1e30, 1e30)
    for token, count in wishes.output_counts.items():
        x[token] = x[token] / wishes.repetition if x[token] > 0 else x[token] * wishes.repetition
        x[token] = np.clip(x[token] - count * wishes.frequency - (wishes.presence if count else 0), -1e30, 1e30)
    x[list(wishes.barred)] = -np.inf
    return x


def filtered(x: np.ndarray, wishes: Wishes) -> np.ndarray:
    """Temperature, then min-p, top-k and top-p each on what the one before left."""
    x = (x - x.max()) / wishes.temperature
    x = np.where(np.exp(x) < wishes.min_p, -np.inf, x)
    if wishes.top_k:
        x = np.where(x < np.sort(x)[::-1][min(wishes.top_k, len(x)) - 1], -np.inf, x)
    if wishes.top_p < 1:
        falling = np.sort(x)[::-1]
        p = softmax(falling)
        num_kept = max(1, int(((np.cumsum(p) - p) < wishes.top_p).sum()))
        x = np.where(x < falling[num_kept - 1], -np.inf, x)
    return x


def choose(logits: np.ndarray, wishes: Wishes, noise: np.ndarray) -> int:
    x = changed(logits, wishes)
    return int(np.argmax(filtered(x, wishes) + noise if wishes.temperature else x))


def decisive_choice(logits: np.ndarray, wishes: Wishes, noise: np.ndarray) -> int | None:
    """`choose`; None where there is none, and where float32 may decide otherwise: two scores, or a limit and what
    it limits, come too close."""
    x = changed(logits, wishes)
    if x.max() == -np.inf:
        return None
    scores = filtered(x, wishes) + noise if wishes.temperature else x
    token = int(np.argmax(scores))
    best = np.sort(scores)[::-1][:2]
    if (
        len(best) == 2
        and best[0] - best[1] < 1e-4 * max(1, abs(best[0]))
        and (wishes.temperature or best[0] != best[1])
    ):
        return None
    for shift in (-1e-5, 1e-5):
        top_p = wishes.top_p * (1 + shift) if wishes.top_p < 1 else 1
        near = replace(wishes, min_p=min(1, wishes.min_p * (1 + shift)), top_p=top_p)
        if choose(logits, near, noise) != token:
            return None
    return token
