"""Chooses a token for each row of logits by the parameters of its slot. Called by the model runner; rules are in
kernels/sampling, what sequences want changed in adjustments.py.

A batch of greedy sequences that ask for nothing else costs one argmax."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from torch import Tensor

from batchinfer.engine.adjustments import Adjustments
from batchinfer.engine.device_queue import Array, DeviceQueue
from batchinfer.kernels import sampling
from batchinfer.kernels.sampling import LogitChanges
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


@dataclass(frozen=True, slots=True)
class _Asking:
    """Rows that ask for log-probabilities, a block whose logits may be copied at once."""

    rows: Indices
    index: Tensor  # the rows on the device
    counts: list[int]  # of alternatives


@dataclass(frozen=True, slots=True)
class SamplingPlan:
    """How the rows of some logits are sampled. parameters: those of sampling.sample, None where all rows are plainly
    greedy; changes: None where no row wants any."""

    parameters: tuple[Tensor, ...] | None
    changes: LogitChanges | None
    asking: tuple[_Asking, ...]

    @property
    def rows_with_logprobs(self) -> Iterator[int]:
        return (row for asking in self.asking for row in asking.rows.tolist())

    def choose(self, logits: Tensor) -> list[Tensor]:
        """The device's part. logits [n, vocab], of a float dtype, left as they are. Returns token ids, int64 [n], and
        what `take` needs beside them."""
        if self.parameters is None:
            token_ids, is_finite = sampling.greedy(logits)
        else:
            token_ids, is_finite = sampling.sample(logits, *self.parameters, self.changes)
        found = [token_ids, is_finite]
        for asking in self.asking:
            ids = token_ids[asking.index]
            found.append(ids)
            found += sampling.token_logprobs(logits[asking.index].float(), ids, max(asking.counts))
        return found

    def take(self, arrays: Iterator[Array]) -> SampledTokens:
        """The host's part: the next of the arrays are what `choose` returned."""
        token_ids, is_finite = next(arrays), next(arrays)
        logprobs = {}
        for asking in self.asking:
            columns = (asking.rows.tolist(), asking.counts, *(next(arrays).tolist() for _ in range(4)))
            for row, count, token_id, logprob, top_ids, top in zip(*columns, strict=True):
                pairs = zip(top_ids[:count], top[:count], strict=True)
                logprobs[row] = TokenLogprob(token_id, logprob, tuple(pairs))
        return SampledTokens(token_ids.astype(np.int32), is_finite, logprobs)


class Sampler:
    """Holds the sampling parameters of the running sequences, by slot."""

    def __init__(self, num_slots: int, eos_token_ids: frozenset[int], queue: DeviceQueue) -> None:
        self._upload = queue.upload
        self._adjustments = Adjustments(eos_token_ids, queue.upload)
        self._is_adjusted = np.zeros(num_slots, np.bool_)
        self._counts_tokens = np.zeros(num_slots, np.bool_)
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
        self._counts_tokens[slot] = self._adjustments.counts_tokens(slot)
        self._temperature[slot] = 0 if params.is_greedy else params.temperature
        self._min_p[slot] = params.min_p
        self._top_k[slot] = max(params.top_k, 0)
        self._top_p[slot] = params.top_p
        self._noise_key[slot] = np.uint64(started.request.noise_key).astype(np.int64)
        self._num_logprobs[slot] = _NO_LOGPROBS if params.logprobs is None else params.logprobs

    def release(self, slot: int) -> None:
        self._adjustments.release(slot)
        self._is_adjusted[slot] = False
        self._counts_tokens[slot] = False
        self._num_logprobs[slot] = _NO_LOGPROBS

    def counts_tokens(self, slots: npt.NDArray[np.int32]) -> npt.NDArray[np.bool_]:
        """Of each slot whether its plan depends on the tokens sampled before, so that these must have been counted."""
        return self._counts_tokens[slots]

    def plan(self, slots: npt.NDArray[np.int32], positions: npt.NDArray[np.int64], vocab_size: int) -> SamplingPlan:
        """For rows of logits of these slots [n]; positions [n]: places of the tokens to sample."""
        parameters: tuple[Tensor, ...] | None = None
        changes: LogitChanges | None = None
        if self._is_adjusted[slots].any() or self._temperature[slots].any():
            state = (self._temperature, self._min_p, self._top_k, self._top_p, self._noise_key)
            parameters = (*(self._upload(values[slots]) for values in state), self._upload(positions))
            changes = self._adjustments.changes(slots.tolist(), positions.tolist())
        return SamplingPlan(parameters, changes, tuple(self._asking(slots, vocab_size)))

    def count(self, slots: npt.NDArray[np.int32], token_ids: npt.NDArray[np.int32]) -> None:
        """token_ids [n] have been sampled in the slots [n]."""
        for row in np.flatnonzero(self._counts_tokens[slots]).tolist():
            self._adjustments.count(int(slots[row]), int(token_ids[row]))

    def _asking(self, slots: npt.NDArray[np.int32], vocab_size: int) -> Iterator[_Asking]:
        num_logprobs = self._num_logprobs[slots]
        asking = np.flatnonzero(num_logprobs != _NO_LOGPROBS)
        size = sampling.rows_per_block(vocab_size)
        for start in range(0, len(asking), size):
            rows = asking[start : start + size]
            yield _Asking(rows, self._upload(rows), num_logprobs[rows].tolist())
