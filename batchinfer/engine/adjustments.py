"""Sparse changes to logits that sequences ask for: logit bias, penalties, tokens barred until min_tokens. Kept by slot
for the sampler; a sequence without any leaves no trace here."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from batchinfer.kernels import sampling
from batchinfer.request import SamplingParams
from batchinfer.scheduler_output import StartedSequence

Ids = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]


class TokenCounts:
    """The distinct tokens of one sequence and how often each stands in its output (0: in the prompt only)."""

    def __init__(self, token_ids: npt.NDArray[np.int32], num_prompt_tokens: int) -> None:
        distinct = np.unique(token_ids)
        self._size = len(distinct)
        self._place = {token_id: i for i, token_id in enumerate(distinct.tolist())}
        self._ids = np.resize(distinct.astype(np.int64), 2 * self._size + 8)
        self._counts = np.zeros(len(self._ids), np.float32)
        for token_id in token_ids[num_prompt_tokens:].tolist():
            self.add(token_id)

    @property
    def token_ids(self) -> Ids:
        return self._ids[: self._size]

    @property
    def output_counts(self) -> Floats:
        return self._counts[: self._size]

    def add(self, token_id: int) -> None:
        """Counts one more output token."""
        place = self._place.setdefault(token_id, self._size)
        if place == self._size:
            self._append(token_id)
        self._counts[place] += 1

    def _append(self, token_id: int) -> None:
        if self._size == len(self._ids):
            self._ids = np.resize(self._ids, 2 * self._size)
            self._counts = np.concatenate([self._counts, np.zeros(self._size, np.float32)])
        self._ids[self._size] = token_id
        self._size += 1


@dataclass(frozen=True, slots=True)
class _Penalties:
    counts: TokenCounts
    factors: tuple[float, float, float]  # repetition, presence, frequency


@dataclass(frozen=True, slots=True)
class _Bias:
    token_ids: Ids
    bias: Floats


@dataclass(frozen=True, slots=True)
class _Barred:
    token_ids: Ids
    until: int  # position from which they are allowed


class Adjustments:
    """eos_token_ids: barred, with a row's own stop ids, before min_tokens."""

    def __init__(self, eos_token_ids: frozenset[int], device: torch.device) -> None:
        self._eos_token_ids = eos_token_ids
        self._device = device
        self._bias: dict[int, _Bias] = {}
        self._penalties: dict[int, _Penalties] = {}
        self._barred: dict[int, _Barred] = {}

    def start(self, started: StartedSequence) -> bool:
        """Takes over a slot; says whether the sequence needs `apply` at all."""
        slot, params = started.slot, started.request.params
        self.release(slot)
        if params.logit_bias:
            bias_ids, bias = zip(*sorted(dict(params.logit_bias).items()), strict=True)
            with np.errstate(over="ignore"):  # add_bias bounds what float32 makes infinite
                self._bias[slot] = _Bias(np.array(bias_ids, np.int64), np.array(bias, np.float64).astype(np.float32))
        if _has_penalties(params):
            counts = TokenCounts(started.token_ids, started.request.num_prompt_tokens)
            factors = (params.repetition_penalty, params.presence_penalty, params.frequency_penalty)
            self._penalties[slot] = _Penalties(counts, factors)
        if params.min_tokens:
            ids = sorted(self._eos_token_ids.union(params.stop_token_ids))
            until = started.request.num_prompt_tokens + params.min_tokens
            self._barred[slot] = _Barred(np.array(ids, np.int64), until)
        return slot in self._bias or slot in self._penalties or slot in self._barred

    def release(self, slot: int) -> None:
        for of_slot in (self._bias, self._penalties, self._barred):
            of_slot.pop(slot, None)

    def count(self, slot: int, token_id: int) -> None:
        """A token was sampled in the slot."""
        if slot in self._penalties:
            self._penalties[slot].counts.add(token_id)

    def apply(self, logits: Tensor, slots: Sequence[int], positions: Sequence[int]) -> None:
        """In place. logits float32 [n, vocab], rows in the order of slots; positions: of the tokens to sample."""
        bias = [(row, self._bias[slot]) for row, slot in enumerate(slots) if slot in self._bias]
        if bias:
            rows, ids = self._pairs([(row, b.token_ids) for row, b in bias])
            sampling.add_bias(logits, rows, ids, self._tensor(np.concatenate([b.bias for _, b in bias])))
        penalties = [(row, self._penalties[slot]) for row, slot in enumerate(slots) if slot in self._penalties]
        if penalties:
            self._penalise(logits, penalties)
        barred = list(self._barred_rows(slots, positions))
        if barred:
            sampling.mask_tokens(logits, *self._pairs(barred))

    def _penalise(self, logits: Tensor, penalties: list[tuple[int, _Penalties]]) -> None:
        rows, ids = self._pairs([(row, p.counts.token_ids) for row, p in penalties])
        counts = self._tensor(np.concatenate([p.counts.output_counts for _, p in penalties]))
        lengths = [len(p.counts.token_ids) for _, p in penalties]
        with np.errstate(over="ignore"):
            factors = np.array([p.factors for _, p in penalties], np.float64).astype(np.float32)
        repetition, presence, frequency = self._tensor(np.repeat(factors.T, lengths, axis=1))
        sampling.apply_penalties(logits, rows, ids, counts, repetition, presence, frequency)

    def _barred_rows(self, slots: Sequence[int], positions: Sequence[int]) -> Iterator[tuple[int, Ids]]:
        for row, (slot, position) in enumerate(zip(slots, positions, strict=True)):
            barred = self._barred.get(slot)
            if barred is not None and position < barred.until:
                yield row, barred.token_ids

    def _pairs(self, ids_by_row: Sequence[tuple[int, Ids]]) -> tuple[Tensor, Tensor]:
        """(rows, token ids), both int64 [k]."""
        rows = np.repeat([row for row, _ in ids_by_row], [len(ids) for _, ids in ids_by_row])
        return self._tensor(rows), self._tensor(np.concatenate([ids for _, ids in ids_by_row]))

    def _tensor(self, array: npt.NDArray[np.generic]) -> Tensor:
        return torch.from_numpy(array).to(self._device)


def _has_penalties(params: SamplingParams) -> bool:
    return params.repetition_penalty != 1 or params.presence_penalty != 0 or params.frequency_penalty != 0
