"""Sparse changes to logits that sequences ask for: logit bias, penalties, tokens barred until min_tokens. Kept by slot
for the sampler; a sequence without any leaves no trace here."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from batchinfer.kernels import sampling
from batchinfer.kernels.sampling import LogitChanges, RowTokens
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
    """eos_token_ids: barred, with a row's own stop ids, before min_tokens. upload: makes tensors of the device."""

    def __init__(self, eos_token_ids: frozenset[int], upload: Callable[[npt.NDArray[Any]], Tensor]) -> None:
        self._eos_token_ids = eos_token_ids
        self._upload = upload
        self._bias: dict[int, _Bias] = {}
        self._penalties: dict[int, _Penalties] = {}
        self._barred: dict[int, _Barred] = {}

    def start(self, started: StartedSequence) -> bool:
        """Takes over a slot; says whether the sequence wants changes at all."""
        slot, params = started.slot, started.request.params
        self.release(slot)
        if params.logit_bias:
            bias_ids, bias = zip(*sorted(dict(params.logit_bias).items()), strict=True)
            with np.errstate(over="ignore"):  # a sum that this makes infinite is bounded
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

    def counts_tokens(self, slot: int) -> bool:
        """Whether what its sequence wants depends on the tokens sampled so far."""
        return slot in self._penalties

    def count(self, slot: int, token_id: int) -> None:
        """A token was sampled in the slot."""
        if slot in self._penalties:
            self._penalties[slot].counts.add(token_id)

    def changes(self, slots: Sequence[int], positions: Sequence[int]) -> LogitChanges | None:
        """What the rows of these slots want, at the positions of the tokens to sample; None where they want nothing."""
        bias = {row: self._bias[slot] for row, slot in enumerate(slots) if slot in self._bias}
        penalties = {row: self._penalties[slot] for row, slot in enumerate(slots) if slot in self._penalties}
        barred = dict(self._barred_rows(slots, positions))
        if not (bias or penalties or barred):
            return None
        n = len(slots)
        return LogitChanges(
            self._bias_of(bias, n) if bias else None,
            self._penalties_of(penalties, n) if penalties else None,
            self._row_tokens(barred, n) if barred else None,
        )

    def _bias_of(self, bias: Mapping[int, _Bias], n: int) -> sampling.Bias:
        tokens = self._row_tokens({row: b.token_ids for row, b in bias.items()}, n)
        return sampling.Bias(tokens, self._upload(np.concatenate([b.bias for b in bias.values()])))

    def _penalties_of(self, penalties: Mapping[int, _Penalties], n: int) -> sampling.Penalties:
        tokens = self._row_tokens({row: p.counts.token_ids for row, p in penalties.items()}, n)
        counts = np.concatenate([p.counts.output_counts for p in penalties.values()])
        factors = np.zeros((3, n), np.float32)
        with np.errstate(over="ignore"):
            factors[:, list(penalties)] = np.array([p.factors for p in penalties.values()], np.float64).T
        return sampling.Penalties(tokens, self._upload(counts), *self._upload(factors))

    def _barred_rows(self, slots: Sequence[int], positions: Sequence[int]) -> Iterator[tuple[int, Ids]]:
        for row, (slot, position) in enumerate(zip(slots, positions, strict=True)):
            barred = self._barred.get(slot)
            if barred is not None and position < barred.until:
                yield row, barred.token_ids

    def _row_tokens(self, ids_by_row: Mapping[int, Ids], n: int) -> RowTokens:
        """ids_by_row: by rising row, at least one."""
        lengths = np.zeros(n, np.int64)
        lengths[list(ids_by_row)] = [len(ids) for ids in ids_by_row.values()]
        offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
        return RowTokens(self._upload(offsets), self._upload(np.concatenate(list(ids_by_row.values()))))


def _has_penalties(params: SamplingParams) -> bool:
    return params.repetition_penalty != 1 or params.presence_penalty != 0 or params.frequency_penalty != 0
