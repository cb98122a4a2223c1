"""Forecasts of a job under given options: exact where that takes seconds, else as a flow. Called by plan.py and
advice.py."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from batchinfer.config import JobConfig
from batchinfer.planning.fluid import FlowRequests, flow_forecast
from batchinfer.planning.job_rows import IntArray, JobRows
from batchinfer.planning.prefixes import Sharing
from batchinfer.planning.simulation import CacheBlocks, simulate
from batchinfer.planning.step_trace import Forecast
from batchinfer.scheduling.order import packed_order

_EXACT_TOKENS = 400_000  # generated, up to which the scheduler itself is run
_ROUGH_REQUESTS = 20_000  # of a rough forecast, about


@dataclass(frozen=True)
class JobShape:
    """A job's rows, to be forecast under several options. layers_by_window: of the model."""

    rows: JobRows
    layers_by_window: Mapping[int | None, int]
    _by_order: dict[bool, FlowRequests] = field(default_factory=dict, init=False)  # by whether rows are reordered

    def exact(self, config: JobConfig, blocks: CacheBlocks, max_model_len: int) -> Forecast | None:
        """By the real scheduler; None where that would take long."""
        requests = self.rows.requests
        if requests is None or sum(self.rows.expected_tokens) > _EXACT_TOKENS:
            return None
        expected = self.rows.expected_tokens
        return simulate(requests, expected, config.scheduler, blocks, self.layers_by_window, max_model_len)

    def flow(self, config: JobConfig, blocks: CacheBlocks, max_model_len: int, is_rough: bool = False) -> Forecast:
        """As a flow, scaled to the whole job where only some of its rows were read. is_rough: of a part of the requests
        at most, for comparing options; its counts are not the job's."""
        requests = self._ordered(config)
        if not blocks.enable_prefix_caching or config.scheduler.reserves:
            requests = replace(requests, sharing=_nothing_shared(len(requests.prompts)))
        if is_rough:
            requests = requests.every(max(1, self.rows.num_requests // _ROUGH_REQUESTS))
        found = flow_forecast(requests, config.scheduler, blocks, self.layers_by_window, max_model_len)
        return found if is_rough else self._scaled(found)

    def _ordered(self, config: JobConfig) -> FlowRequests:
        """The requests in the order in which they start, worked out once for each order."""
        key = config.scheduler.reorders
        if key not in self._by_order:
            order = self._order(config)
            found = self.rows.prefixes.sharing(order)
            self._by_order[key] = FlowRequests(
                np.array(self.rows.prompt_tokens, np.int64)[order],
                Sharing(found.cached[order], found.shared[order], found.groups[order]),
                np.array(self.rows.expected_tokens, np.int64)[order],
            )
        return self._by_order[key]

    def _scaled(self, found: Forecast) -> Forecast:
        if self.rows.num_read == self.rows.num_rows:
            return found
        whole, factor = self.rows.whole, self.rows.num_rows / max(1, self.rows.num_read)
        return replace(
            found,
            trace=replace(found.trace, repeats=found.trace.repeats * factor),
            preemptions=whole(found.preemptions),
            recomputed_tokens=whole(found.recomputed_tokens),
            cached_tokens=whole(found.cached_tokens),
            output_tokens=whole(found.output_tokens),
        )

    def _order(self, config: JobConfig) -> IntArray:
        """In which the requests start. Where there are too many to keep their prompts, that of the input: what is
        served of shared beginnings by a cache that never forgets is the same in any order."""
        requests = self.rows.requests
        if requests is None or not config.scheduler.reorders:
            return np.arange(self.rows.num_requests)
        firsts = [i for i, request in enumerate(requests) if request.id.sample == 0]
        prompts = [requests[i].prompt_token_ids for i in firsts]
        sizes = np.diff([*firsts, len(requests)])
        expected = np.add.reduceat(np.array(self.rows.expected_tokens, np.float64), firsts)
        order = packed_order(prompts, expected, config.cache.block_size, config.scheduler.max_num_seqs)
        return np.concatenate([firsts[i] + np.arange(sizes[i]) for i in order.tolist()])

    @cached_property
    def servable_tokens(self) -> int:
        """Prompt tokens that the prefix cache serves where it never forgets; the order does not matter."""
        return int(self.rows.prefixes.sharing().cached.sum())


def _nothing_shared(count: int) -> Sharing:
    return Sharing(*(np.zeros(count, np.int64) for _ in range(3)))
