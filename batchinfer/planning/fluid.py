"""A job's steps as a flow, for jobs whose steps are too many to simulate one by one and for comparing options: runs of
steps in which hardly a sequence ends count as one. Called by forecast.py; tests hold it against simulation.py."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from batchinfer.config import SchedulerConfig
from batchinfer.engine.stats import attention_work
from batchinfer.planning.prefixes import Sharing
from batchinfer.planning.simulation import CacheBlocks
from batchinfer.planning.step_trace import Forecast, IntArray, StepTrace

_ENDING_SHARE = 0.03  # of the running sequences may end within one run of steps
_WATERMARK = 0.01  # share of the blocks that greedy admission leaves free
_ID, _TODO, _LEFT, _HELD, _SHARED = range(5)  # rows of _Flow._running


@dataclass(frozen=True, slots=True)
class FlowRequests:
    """In the order in which they start; int64 [requests]. sharing: of their prompts, in that order. outputs: tokens
    that each is expected to generate."""

    prompts: IntArray
    sharing: Sharing
    outputs: IntArray


def flow_forecast(
    requests: FlowRequests,
    config: SchedulerConfig,
    blocks: CacheBlocks,
    layers_by_window: Mapping[int | None, int],
    max_model_len: int,
) -> Forecast:
    """The figures that simulate() gives, as a flow. A prefix once computed is taken to stay in the cache."""
    flow = _Flow(requests, config, blocks, layers_by_window, max_model_len)
    while not flow.is_done:
        flow.advance()
    return flow.forecast()


class _Flow:
    """_running: int64 [5, sequences], in the order of admission: its number; prompt tokens still to compute; tokens
    still to sample; tokens whose KV is held; of these, those in shared blocks."""

    def __init__(
        self,
        requests: FlowRequests,
        config: SchedulerConfig,
        blocks: CacheBlocks,
        layers_by_window: Mapping[int | None, int],
        max_model_len: int,
    ) -> None:
        self._requests, self._config, self._blocks = requests, config, blocks
        self._layers_by_window, self._max_model_len = layers_by_window, max_model_len
        self._running = np.zeros((5, 0), np.int64)
        self._next = 0  # the first request that has not started
        self._preempted: list[IntArray] = []  # columns of _running, the next to resume last
        self._runs: list[tuple[float, ...]] = []
        self._num_preemptions = self._recomputed = 0

    @property
    def is_done(self) -> bool:
        return self._next == len(self._requests.prompts) and not self._preempted and not self._running.shape[1]

    def advance(self) -> None:
        """One step with what prompts it computes, and then the decode steps until some sequences end."""
        self._admit()
        while self._used_blocks(self._after_mixed_step()) > self._blocks.num_blocks and self._running.shape[1] > 1:
            self._preempt()
        counts = self._counts()
        self._running[_TODO] -= np.minimum(counts, self._running[_TODO])
        self._running[_HELD] += counts
        samples = self._running[_TODO] == 0
        scored = samples & (self._running[_LEFT] == 0)
        self._running[_LEFT] -= samples & ~scored
        self._record(counts, samples & ~scored)
        waits = not samples.all() or self._may_admit_now()
        self._running = self._running[:, (self._running[_LEFT] > 0) | ~samples]
        if not waits:
            self._decode()

    # One step

    def _counts(self) -> IntArray:
        """Tokens that each sequence computes in a step: one where its prompt is done, else a chunk of it."""
        todo = self._running[_TODO]
        decodes = todo == 0
        budget = max(0, self._config.max_num_batched_tokens - int(decodes.sum()))
        before = np.cumsum(todo) - todo
        return np.where(decodes, 1, np.clip(budget - before, 0, todo))

    def _after_mixed_step(self) -> IntArray:
        return self._running[_HELD] + self._counts()

    def _used_blocks(self, held: IntArray) -> int:
        if self._config.kv_allocation == "contiguous":
            return len(held) * self._blocks_of(self._max_model_len)
        shared = self._running[_SHARED]
        known = np.maximum(held, self._running[_HELD] + self._running[_TODO])  # a prompt has its blocks from the start
        own = -(-(known - shared) // self._blocks.block_size)
        return int(own.sum()) + self._shared_blocks(self._running)

    def _shared_blocks(self, running: IntArray) -> int:
        """Blocks of the beginnings that running sequences have in common."""
        sharing = running[:, running[_SHARED] > 0]
        if not sharing.shape[1]:
            return 0
        _, first = np.unique(self._requests.sharing.groups[sharing[_ID]], return_index=True)
        return int(sharing[_SHARED][first].sum()) // self._blocks.block_size

    def _blocks_of(self, tokens: int) -> int:
        return -(-tokens // self._blocks.block_size)

    # Decode steps

    def _decode(self) -> None:
        """Steps of one token a sequence, until a few have ended or the cache is full."""
        left = self._running[_LEFT]
        if not len(left):
            return
        rank = min(len(left) - 1, int(_ENDING_SHARE * len(left)))
        steps = int(np.partition(left, rank)[rank])
        room = (self._blocks.num_blocks - self._used_blocks(self._running[_HELD])) * self._blocks.block_size
        if self._used_blocks(self._running[_HELD] + np.minimum(left, steps)) > self._blocks.num_blocks:
            steps = room // len(left)
        if steps < 1:
            return
        counts = np.minimum(left, steps)
        middle = self._running[_HELD] + counts // 2
        self._running[_HELD] += counts
        self._running[_LEFT] -= counts
        active = int(counts.sum()) / steps
        tokens, pairs = attention_work(middle, np.ones_like(middle), self._layers_by_window)
        share, used = active / len(counts), self._used_blocks(self._running[_HELD])
        self._runs.append((steps, active, active, active, tokens * share, pairs * share, used))
        self._running = self._running[:, self._running[_LEFT] > 0]

    def _record(self, counts: IntArray, samples: IntArray) -> None:
        """Of one step that has just been taken."""
        active = counts > 0
        work = attention_work((self._running[_HELD] - counts)[active], counts[active], self._layers_by_window)
        used = min(self._used_blocks(self._running[_HELD]), self._blocks.num_blocks)
        self._runs.append((1, active.sum(), counts.sum(), samples.sum(), *work, used))

    # Admission

    def _may_admit_now(self) -> bool:
        """Whether others start in the very next step, as this one's tokens were all taken."""
        is_waiting = self._next < len(self._requests.prompts) or bool(self._preempted)
        return is_waiting and self._config.batching == "continuous" and self._num_fitting() > 0

    def _admit(self) -> None:
        if self._config.batching == "static" and self._running.shape[1] and not self._preempted:
            return
        while self._preempted and self._num_fitting():
            self._running = np.concatenate([self._running, self._preempted.pop()[:, None]], axis=1)
        if not self._preempted and (count := self._num_fitting()):
            columns = self._candidates(count)
            self._running = np.concatenate([self._running, columns], axis=1)
            self._next += count

    def _candidates(self, count: int) -> IntArray:
        """The columns of the next requests."""
        if self._preempted:
            return self._preempted[-1][:, None]
        ids = np.arange(self._next, min(self._next + count, len(self._requests.prompts)))
        prompts, sharing = self._requests.prompts[ids], self._requests.sharing
        cached, shared = sharing.cached[ids], sharing.shared[ids]
        return np.stack([ids, prompts - cached, self._requests.outputs[ids], cached, shared])

    def _num_fitting(self) -> int:
        """How many of the next requests may start now."""
        decoding = int((self._running[_TODO] == 0).sum())
        backlog = int(self._running[_TODO].sum())
        budget = self._config.max_num_batched_tokens - decoding - backlog
        free_slots = self._config.max_num_seqs - self._running.shape[1]
        if budget <= 0 or free_slots <= 0:
            return 0
        columns = self._candidates(free_slots)
        todo = columns[_TODO]
        columns = columns[:, np.cumsum(todo) - todo < budget]
        low, high = 0, columns.shape[1]
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self._fits(columns[:, :middle]) else (low, middle - 1)
        return low if low or self._running.shape[1] or not columns.shape[1] else 1

    def _fits(self, more: IntArray) -> bool:
        total = self._blocks.num_blocks
        running = np.concatenate([self._running, more], axis=1)
        if self._config.kv_allocation == "contiguous":
            return running.shape[1] * self._blocks_of(self._max_model_len) <= total
        size = self._blocks.block_size
        held, shared = running[_HELD] + running[_TODO], self._shared_blocks(running)
        now = int((-(-(held - running[_SHARED]) // size)).sum()) + shared
        if self._config.admission == "greedy":
            return now + int(np.ceil(_WATERMARK * total)) <= total
        # The most that is ever held: when a sequence ends, all with more left have grown by what it had left.
        order = np.argsort(-running[_LEFT], kind="stable")
        own, left = (held - running[_SHARED])[order], running[_LEFT][order]
        peak = (np.cumsum(own) + left * np.arange(1, len(left) + 1)) / size + np.arange(1, len(left) + 1) / 2
        return shared + float(peak.max(initial=0)) <= total

    def _preempt(self) -> None:
        """The sequence admitted last loses its KV and resumes later."""
        column = self._running[:, -1].copy()
        lost = max(0, int(column[_HELD] - column[_SHARED]))
        self._recomputed += lost
        column[_TODO] += lost
        column[_HELD] -= lost
        self._preempted.append(column)
        self._running = self._running[:, :-1]
        self._num_preemptions += 1

    def forecast(self) -> Forecast:
        trace = StepTrace(*np.array(self._runs, np.float64).reshape(-1, 7).T)
        cached, outputs = int(self._requests.sharing.cached.sum()), int(self._requests.outputs.sum())
        return Forecast(trace, self._num_preemptions, self._recomputed, cached, outputs, is_exact=False)
