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
from batchinfer.scheduling.admission import WATERMARK
from batchinfer.scheduling.usage import Growing

_ENDING_SHARE = 0.03  # of the running sequences may end within one run of steps
_ID, _PENDING, _LEFT, _HELD, _SHARED = range(5)  # rows of _Flow._running


@dataclass(frozen=True, slots=True)
class FlowRequests:
    """In the order in which they start; int64 [requests]. sharing: of their prompts, in that order. outputs: tokens
    that each is expected to generate."""

    prompts: IntArray
    sharing: Sharing
    outputs: IntArray

    def every(self, stride: int) -> "FlowRequests":
        """One in so many of them."""
        kept, sharing = slice(None, None, stride), self.sharing
        thinned = Sharing(sharing.cached[kept], sharing.shared[kept], sharing.groups[kept])
        return FlowRequests(self.prompts[kept], thinned, self.outputs[kept])


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
        self._places = 0  # left in the open batch, where batching is static
        self._preempted: list[IntArray] = []  # columns of _running, the next to resume last
        self._runs: list[tuple[float, ...]] = []
        self._num_preemptions = self._recomputed = 0

    @property
    def is_done(self) -> bool:
        return not self._is_waiting and not self._running.shape[1]

    @property
    def _is_waiting(self) -> bool:
        return self._next < len(self._requests.prompts) or bool(self._preempted)

    def advance(self) -> None:
        """One step with what prompts it computes, and then the decode steps until some sequences end."""
        self._admit()
        while self._used_blocks(self._after_mixed_step()) > self._blocks.num_blocks and self._running.shape[1] > 1:
            self._preempt()
        counts = self._counts()
        self._running[_PENDING] -= np.minimum(counts, self._running[_PENDING])
        self._running[_HELD] += counts
        samples = self._running[_PENDING] == 0
        scored = samples & (self._running[_LEFT] == 0)
        self._running[_LEFT] -= samples & ~scored
        self._record(counts, samples & ~scored)
        self._running = self._running[:, (self._running[_LEFT] > 0) | ~samples]
        if samples.all() and not self._num_fitting():
            self._decode()

    # One step

    def _counts(self) -> IntArray:
        """Tokens that each sequence computes in a step: one where its prompt is done, else a chunk of it."""
        pending = self._running[_PENDING]
        decodes = pending == 0
        budget = max(0, self._config.max_num_batched_tokens - int(decodes.sum()))
        before = np.cumsum(pending) - pending
        return np.where(decodes, 1, np.clip(budget - before, 0, pending))

    def _after_mixed_step(self) -> IntArray:
        return self._running[_HELD] + self._counts()

    def _used_blocks(self, held: IntArray, running: IntArray | None = None) -> int:
        """held: tokens of each. running: columns, of which it is; None: of all."""
        running = self._running if running is None else running
        if self._config.reserves:
            return len(held) * self._blocks_of(self._max_model_len)
        known = np.maximum(held, running[_HELD] + running[_PENDING])  # a prompt has its blocks from the start
        own = -(-(known - running[_SHARED]) // self._blocks.block_size)
        return int(own.sum()) + self._shared_blocks(running)

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
        if self._is_waiting and len(left) < self._config.max_num_seqs:  # for memory, which may suffice before one ends
            steps = min(steps, self._blocks.block_size)
        before = self._used_blocks(self._running[_HELD])
        after = self._used_at_end(steps)
        if after > self._blocks.num_blocks:
            steps = (self._blocks.num_blocks - before) * self._blocks.block_size // len(left)
            after = self._used_at_end(steps)
        if steps < 1:
            return
        counts = np.minimum(left, steps)
        middle = self._running[_HELD] + counts // 2
        tokens, pairs = attention_work(middle, np.ones_like(middle), self._layers_by_window)
        active = int(counts.sum()) / steps
        share, used = active / len(counts), min(max(before, after), self._blocks.num_blocks)
        self._runs.append((steps, active, active, active, tokens * share, pairs * share, used))
        self._running[_HELD] += counts
        self._running[_LEFT] -= counts
        self._running = self._running[:, self._running[_LEFT] > 0]

    def _used_at_end(self, steps: int) -> int:
        """Blocks in use after so many decode steps, when those that end before have given theirs back."""
        lasting = self._running[:, self._running[_LEFT] >= steps]
        return self._used_blocks(lasting[_HELD] + steps, lasting)

    def _record(self, counts: IntArray, samples: IntArray) -> None:
        """Of one step that has just been taken."""
        active = counts > 0
        work = attention_work((self._running[_HELD] - counts)[active], counts[active], self._layers_by_window)
        used = min(self._used_blocks(self._running[_HELD]), self._blocks.num_blocks)
        self._runs.append((1, active.sum(), counts.sum(), samples.sum(), *work, used))

    # Admission

    def _admit(self) -> None:
        if not self._running.shape[1] and not self._preempted:
            self._places = self._config.max_num_seqs
        while self._preempted and self._num_fitting():
            self._running = np.concatenate([self._running, self._preempted.pop()[:, None]], axis=1)
        if not self._preempted and (count := self._num_fitting()):
            self._running = np.concatenate([self._running, self._candidates(count)], axis=1)
            self._next += count
            self._places -= count

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
        decoding = int((self._running[_PENDING] == 0).sum())
        backlog = int(self._running[_PENDING].sum())
        budget = self._config.max_num_batched_tokens - decoding - backlog
        free_slots = self._config.max_num_seqs - self._running.shape[1]
        if self._config.batching == "static" and not self._preempted:
            free_slots = min(free_slots, self._places if self._running.shape[1] else self._config.max_num_seqs)
        if budget <= 0 or free_slots <= 0:
            return 0
        columns = self._candidates(free_slots)
        pending = columns[_PENDING]
        columns = columns[:, np.cumsum(pending) - pending < budget]
        low, high = 0, columns.shape[1]
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self._fits(columns[:, :middle]) else (low, middle - 1)
        return low if low or self._running.shape[1] or not columns.shape[1] else 1

    def _fits(self, more: IntArray) -> bool:
        total = self._blocks.num_blocks
        running = np.concatenate([self._running, more], axis=1)
        if self._config.reserves:
            return running.shape[1] * self._blocks_of(self._max_model_len) <= total
        size = self._blocks.block_size
        held, shared = running[_HELD] + running[_PENDING], self._shared_blocks(running)
        now = int((-(-(held - running[_SHARED]) // size)).sum()) + shared
        if self._config.admission == "greedy":
            return now + int(np.ceil(WATERMARK * total)) <= total
        growth = np.maximum(running[_LEFT] - (running[_PENDING] > 0), 0)  # a prompt's step samples the first token
        growing = Growing(held, growth, running[_SHARED] // size, size)
        return shared + int(growing.usage(np.unique(growth)).blocks.max()) <= total

    def _preempt(self) -> None:
        """The sequence admitted last loses its KV and resumes later."""
        column = self._running[:, -1].copy()
        lost = max(0, int(column[_HELD] - column[_SHARED]))
        self._recomputed += lost
        column[_PENDING] += lost
        column[_HELD] -= lost
        self._preempted.append(column)
        self._running = self._running[:, :-1]
        self._num_preemptions += 1

    def forecast(self) -> Forecast:
        trace = StepTrace(*np.array(self._runs, np.float64).reshape(-1, 7).T)
        cached, outputs = int(self._requests.sharing.cached.sum()), int(self._requests.outputs.sum())
        return Forecast(trace, self._num_preemptions, self._recomputed, cached, outputs, is_exact=False)
