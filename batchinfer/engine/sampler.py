"""Chooses a token for each row of logits by the parameters of its slot. Called by the model runner; rules are in
kernels/sampling, what sequences want changed in adjustments.py.

A batch of greedy sequences that ask for nothing else costs one argmax."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from batchinfer.engine.adjustments import Adjustments
from batchinfer.kernels import sampling
from batchinfer.request import TokenLogprob
from batchinfer.scheduler_output import StartedSequence

Indices = npt.NDArray[np.intp]
_NO_LOGPROBS = -1


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """token_ids int32 [n], is_finite bool [n]; logprobs by row, for the rows whose sequence asks for them."""

    token_ids: npt.NDArray[np.int32]
    is_finite: npt.NDArray[np.bool_]
    logprobs: Mapping[int, TokenLogprob]


class Sampler:
    """Holds the sampling parameters of the running sequences, by slot."""

    def __init__(self, num_slots: int, eos_token_ids: frozenset[int], device: torch.device) -> None:
        self._device = device
        self._adjustments = Adjustments(eos_token_ids, device)
        self._is_adjusted = np.zeros(num_slots, np.bool_)
        self._temperature = np.zeros(num_slots, np.float32)  # 0: greedy
        self._min_p = np.zeros(num_slots, np.float32)
        self._top_k = np.zeros(num_slots, np.int64)
        self._top_p = np.ones(num_slots, np.float32)
        self._noise_key = np.zeros(num_slots, np.int64)  # bits of the unsigned key
        self._num_logprobs = np.full(num_slots, _NO_LOGPROBS, np.int32)

    def start(self, started: StartedSequence) -> None:
        """Takes a slot over for a sequence, new or back after preemption."""
        slot, params = started.slot, started.request.params
        self._is_adjusted[slot] = self._adjustments.start(started)
        self._temperature[slot] = 0 if params.is_greedy else params.temperature
        self._min_p[slot] = params.min_p
        self._top_k[slot] = max(params.top_k, 0)
        self._top_p[slot] = params.top_p
        self._noise_key[slot] = np.uint64(started.request.noise_key).astype(np.int64)
        self._num_logprobs[slot] = _NO_LOGPROBS if params.logprobs is None else params.logprobs

    def release(self, slot: int) -> None:
        self._adjustments.release(slot)
        self._is_adjusted[slot] = False
        self._num_logprobs[slot] = _NO_LOGPROBS

    def sample(self, logits: Tensor, slots: npt.NDArray[np.int32], positions: npt.NDArray[np.int64]) -> SampledTokens:
        """logits [n, vocab], of a float dtype, left as they are; slots [n]; positions [n]: places of the tokens to
        sample."""
        is_adjusted = self._is_adjusted[slots]
        if is_adjusted.any() or self._temperature[slots].any():
            token_ids, is_finite = self._choose(logits, slots, positions)
        else:
            token_ids, is_finite = sampling.greedy(logits)
        chosen = token_ids.cpu().numpy().astype(np.int32)
        for row in np.flatnonzero(is_adjusted).tolist():
            self._adjustments.count(int(slots[row]), int(chosen[row]))
        return SampledTokens(chosen, is_finite.cpu().numpy(), self._logprobs(logits, token_ids, slots))

    def _choose(
        self, logits: Tensor, slots: npt.NDArray[np.int32], positions: npt.NDArray[np.int64]
    ) -> tuple[Tensor, Tensor]:
        state = (self._temperature, self._min_p, self._top_k, self._top_p, self._noise_key)
        parameters = [self._tensor(values[slots]) for values in state]
        changes = self._adjustments.changes(slots.tolist(), positions.tolist())
        return sampling.sample(logits, *parameters, self._tensor(positions), changes)

    def _logprobs(self, logits: Tensor, token_ids: Tensor, slots: npt.NDArray[np.int32]) -> Mapping[int, TokenLogprob]:
        num_logprobs = self._num_logprobs[slots]
        asking = np.flatnonzero(num_logprobs != _NO_LOGPROBS)
        logprobs = {}
        for rows in _blocks(asking, logits.shape[-1]):
            index = self._tensor(rows)
            ids = token_ids[index]
            found = sampling.token_logprobs(logits[index].float(), ids, int(num_logprobs[rows].max()))
            columns = (ids.tolist(), *(values.tolist() for values in found))
            for row, token_id, logprob, top_ids, top in zip(rows.tolist(), *columns, strict=True):
                count = int(num_logprobs[row])
                pairs = zip(top_ids[:count], top[:count], strict=True)
                logprobs[row] = TokenLogprob(token_id, logprob, tuple(pairs))
        return logprobs

    def _tensor(self, array: npt.NDArray[np.generic]) -> Tensor:
        return torch.from_numpy(array).to(self._device)


def _blocks(rows: Indices, vocab_size: int) -> Iterator[Indices]:
    size = sampling.rows_per_block(vocab_size)
    for start in range(0, len(rows), size):
        yield rows[start : start + size]
