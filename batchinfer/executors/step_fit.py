"""Fits the time of a model's steps to steps that were timed. Pure; called by device_profile.py."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from batchinfer.roofline import StepTimes

_APART = 3  # times as many tokens make another knot

FloatArray = npt.NDArray[np.float64]


class TimedStep(NamedTuple):
    """What a step computed, and how long it took. cache_tokens: that attention read; pairs: of a query and a key."""

    tokens: float
    samples: float
    cache_tokens: float
    pairs: float
    seconds: float


def fit_step_times(steps: Sequence[TimedStep], measured_on: str, date: str) -> StepTimes:
    """Non-negative least squares of the relative deviations: the time of tokens at the counts that were timed, linear
    between them, and of each sample, cached token and pair."""
    matrix, seconds = _features(steps), np.array([step.seconds for step in steps])
    knots = _knots(steps)
    matrix = np.concatenate([_hats(np.array([s.tokens for s in steps], np.float64), knots), matrix], axis=1)
    weighted = matrix / seconds[:, None]
    found = non_negative_least_squares(weighted, np.ones(len(steps)))
    error = float(np.abs(weighted @ found - 1).mean())
    tokens_s, (sample_s, cache_token_s, pair_s) = found[: len(knots)], found[len(knots) :].tolist()
    rising = np.maximum.accumulate(tokens_s).tolist()  # more tokens never take less time
    return StepTimes(tuple(knots), tuple(rising), sample_s, cache_token_s, pair_s, error, measured_on, date)


def _knots(steps: Sequence[TimedStep]) -> list[int]:
    knots: list[int] = []
    for tokens in sorted(round(step.tokens) for step in steps):
        if not knots or tokens >= _APART * knots[-1]:
            knots.append(tokens)
    most = max(round(step.tokens) for step in steps)
    return knots if knots[-1] == most else [*knots, most]


def _features(steps: Sequence[TimedStep]) -> FloatArray:
    return np.array([[step.samples, step.cache_tokens, step.pairs] for step in steps], np.float64)


def _hats(tokens: FloatArray, knots: Sequence[int]) -> FloatArray:
    """[steps, knots]: the weights that linear interpolation at `tokens` gives the knots."""
    unit = np.eye(len(knots))
    beyond = np.maximum(1.0, tokens / knots[-1])
    return np.stack([np.interp(tokens, knots, row) for row in unit], axis=1) * beyond[:, None]


def non_negative_least_squares(matrix: FloatArray, target: FloatArray) -> FloatArray:
    """The x >= 0 that minimises |matrix x - target|, by active sets (Lawson and Hanson, 1974, chapter 23)."""
    scale = np.linalg.norm(matrix, axis=0)
    scale[scale == 0] = 1.0
    matrix = matrix / scale
    count = matrix.shape[1]
    found, active = np.zeros(count), np.zeros(count, np.bool_)
    for _ in range(10 * count):
        gradient = matrix.T @ (target - matrix @ found)
        gradient[active] = -np.inf
        best = int(gradient.argmax())
        if gradient[best] <= 1e-10:
            break
        active[best] = True
        found = _solve_active(matrix, target, found, active)
    return found / scale


def _solve_active(
    matrix: FloatArray,
    target: FloatArray,
    found: FloatArray,
    active: npt.NDArray[np.bool_],
) -> FloatArray:
    """The solution over the active columns, those that would become negative taken out of `active` on the way."""
    while True:
        wanted = np.zeros(len(found))
        wanted[active] = np.linalg.lstsq(matrix[:, active], target, rcond=None)[0]
        if (wanted[active] > 0).all():
            return wanted
        falling = active & (wanted <= 0)
        share = np.min(found[falling] / (found[falling] - wanted[falling] + 1e-300))
        found = found + share * (wanted - found)
        active &= found > 1e-12
        found[~active] = 0.0
