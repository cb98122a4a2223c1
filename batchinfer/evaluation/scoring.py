"""Scores of windows of text by one model, or by two: log-probabilities of the targets and how far the distributions
lie apart. Called by evaluate.py."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from batchinfer.cache.paged_kv import PagedKVCache
from batchinfer.cache.spec import KVCacheSpec
from batchinfer.engine.divergence import Divergence, Floats, join, score, score_against
from batchinfer.engine.whole_sequences import blocks_needed, pack, run_whole
from batchinfer.errors import BatchInferError
from batchinfer.evaluation.windows import TokenIds
from batchinfer.models.decoder import Decoder


@dataclass(frozen=True, slots=True)
class Side:
    """One of the two: a model and the cache that it reads its keys and values back from."""

    name: str  # for messages
    decoder: Decoder
    cache_spec: KVCacheSpec

    def allocate(self, num_blocks: int) -> PagedKVCache:
        return PagedKVCache(self.cache_spec, num_blocks, self.decoder.device)


@dataclass(frozen=True, slots=True)
class Scores:
    """Of each target, in text order; memory is 4 to 13 bytes a target."""

    logprobs: Floats  # [n], nats
    against_logprobs: Floats | None  # [n], nats
    divergence: Divergence | None  # of the model from the one it is held against


def score_windows(
    side: Side,
    against: Side | None,
    windows: Sequence[TokenIds],
    tokens_a_pass: int,
    progress: Callable[[int], None],
) -> Scores:
    """windows: at least one. tokens_a_pass: inputs that run through the model at once, at most (a longer window alone).
    progress: told after each pass how many targets are scored.

    Raises BatchInferError where a side's numbers are not finite.
    """
    passes = list(pack([window[:-1] for window in windows], tokens_a_pass))
    sides = [side] if against is None else [side, against]
    runners = [_Runner(one, passes) for one in sides]
    parts: list[Scores] = []
    done = 0
    for inputs in passes:
        targets = [window[1:] for window in windows[done : done + len(inputs)]]
        done += len(inputs)
        parts.append(_score_pass(runners, inputs, np.concatenate(targets)))
        progress(len(parts[-1].logprobs))
    return _join(parts)


class _Runner:
    """A side with a cache that holds any of the passes."""

    def __init__(self, side: Side, passes: Sequence[Sequence[TokenIds]]) -> None:
        self.decoder = side.decoder
        self._name = side.name
        self._block_size = side.cache_spec.block_size
        self._cache = side.allocate(max(blocks_needed(inputs, self._block_size) for inputs in passes))

    def run(self, inputs: Sequence[TokenIds]) -> torch.Tensor:
        return run_whole(self.decoder, self._cache, inputs, self._block_size)

    def check(self, logprobs: Floats) -> Floats:
        if not np.isfinite(logprobs).all():
            raise BatchInferError(f"{self._name}: the model's numbers became NaN or infinite; try --dtype bf16 or fp32")
        return logprobs


def _score_pass(runners: Sequence[_Runner], inputs: Sequence[TokenIds], targets: TokenIds) -> Scores:
    hidden = [runner.run(inputs) for runner in runners]
    token_ids = torch.from_numpy(targets.astype(np.int64)).to(hidden[0].device)
    runner, *others = runners
    if not others:
        return Scores(runner.check(score(runner.decoder, hidden[0], token_ids)), None, None)
    (against,) = others
    scored = score_against(runner.decoder, hidden[0], against.decoder, hidden[1], token_ids)
    return Scores(runner.check(scored[0]), against.check(scored[1]), scored[2])


def _join(parts: Sequence[Scores]) -> Scores:
    against = [part.against_logprobs for part in parts if part.against_logprobs is not None]
    divergence = [part.divergence for part in parts if part.divergence is not None]
    return Scores(
        np.concatenate([part.logprobs for part in parts]),
        np.concatenate(against) if against else None,
        join(divergence) if divergence else None,
    )
