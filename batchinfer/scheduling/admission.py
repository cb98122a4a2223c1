"""Whether the next waiting sequence may start, with which KV blocks, and who gives way where they run out. Owned by the
scheduler, one rule a job."""

import math
from typing import Protocol

import numpy as np
import numpy.typing as npt

from batchinfer.cache.block_pool import BlockPool
from batchinfer.cache.block_run import BlockIds
from batchinfer.scheduling.running_table import RunningTable
from batchinfer.sequence import Sequence

WATERMARK = 0.01  # share of the blocks that greedy admission leaves free for the sequences that run already

TokenIds = npt.NDArray[np.int32]


class Admission(Protocol):
    """A rule of admission."""

    def begin_step(self) -> None:
        """Said before the first acquire() of a step."""

    def acquire(self, sequence: Sequence, token_ids: TokenIds) -> tuple[BlockIds, int] | None:
        """Blocks to start with, and how many of them come filled from the prefix cache; None where the sequence must
        wait. token_ids: all that is known of it. A sequence that would run alone never waits, so that something always
        runs."""

    def victim(self) -> Sequence:
        """Which running sequence is preempted when blocks have run out."""


class Greedy:
    """Starts whatever has room for its known tokens. Each sequence takes further blocks as it grows, so that sequences
    may have to be preempted, the one admitted last first; a few blocks are left free to make that rarer."""

    def __init__(self, table: RunningTable, pool: BlockPool) -> None:
        self._table = table
        self._pool = pool
        self._watermark = math.ceil(WATERMARK * pool.num_blocks)
        self._refused: tuple[Sequence, int] | None = None  # the last that did not fit, and the free blocks it needs

    def begin_step(self) -> None:
        pass

    def acquire(self, sequence: Sequence, token_ids: TokenIds) -> tuple[BlockIds, int] | None:
        num_free = self._pool.num_free_blocks
        is_alone = self._table.num_running == 0
        if self._refused and self._refused[0] is sequence and num_free < self._refused[1] and not is_alone:
            return None
        cached = cached_blocks(self._pool, sequence, token_ids)
        num_new = self._pool.num_blocks_for(len(token_ids)) - len(cached)
        wanted = num_new + (0 if is_alone else self._watermark)
        if wanted > self._pool.num_free_blocks:
            self._refused = (sequence, wanted + num_free - self._pool.num_free_blocks)
            self._pool.free(cached)
            return None
        return with_new_blocks(self._pool, cached, num_new), len(cached)

    def victim(self) -> Sequence:
        return self._table.last_admitted()


class Reservation:
    """Reserves each sequence's room for max_model_len tokens when it starts, as engines did before KV was paged, and
    shares nothing. So no sequence ever lacks a block, and none is preempted but after a numerical fault. The blocks of
    a reservation are any free ones: what it costs is the memory, which neighbouring addresses would not change."""

    def __init__(self, table: RunningTable, pool: BlockPool, max_model_len: int) -> None:
        self._table = table
        self._pool = pool
        self._num_blocks = pool.num_blocks_for(max_model_len)

    def begin_step(self) -> None:
        pass

    def acquire(self, sequence: Sequence, token_ids: TokenIds) -> tuple[BlockIds, int] | None:
        if self._num_blocks > self._pool.num_free_blocks:
            return None
        return self._pool.allocate(self._num_blocks), 0

    def victim(self) -> Sequence:
        return self._table.last_admitted()


def cached_blocks(pool: BlockPool, sequence: Sequence, token_ids: TokenIds) -> BlockIds:
    """References the leading blocks that the prefix cache holds. At least the last token is computed, for its logits;
    where all positions' logits are wanted, all are."""
    if sequence.request.params.prompt_logprobs:
        return np.zeros(0, np.int64)
    return pool.match_prefix(token_ids[:-1], sequence.cache_domain)


def with_new_blocks(pool: BlockPool, cached: BlockIds, num_new: int) -> BlockIds:
    new = pool.allocate(num_new)
    return np.concatenate([cached, new]) if len(cached) else new
