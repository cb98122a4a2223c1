"""Forecasts of a job under given options: exact where that takes seconds, else as a flow. Called by plan.py and
advice.py."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from batchinfer.config import JobConfig
from batchinfer.planning.fluid import FlowRequests, flow_forecast
from batchinfer.planning.job_rows import IntArray, JobRows
from batchinfer.planning.prefixes import Sharing
from batchinfer.planning.simulation import CacheBlocks, simulate
from batchinfer.planning.step_trace import Forecast

_EXACT_TOKENS = 400_000  # generated, up to which the scheduler itself is run


@dataclass(frozen=True)
class JobShape:
    """A job's rows, to be forecast under several options. layers_by_window: of the model."""

    rows: JobRows
    layers_by_window: Mapping[int | None, int]

    def exact(self, config: JobConfig, blocks: CacheBlocks, max_model_len: int) -> Forecast | None:
        """By the real scheduler; None where that would take long."""
        requests = self.rows.requests
        if requests is None or sum(self.rows.expected_tokens) > _EXACT_TOKENS:
            return None
        order = self._order(config)
        return simulate(
            [requests[i] for i in order],
            [self.rows.expected_tokens[i] for i in order],
            config.scheduler,
            blocks,
            self.layers_by_window,
            max_model_len,
        )

    def flow(self, config: JobConfig, blocks: CacheBlocks, max_model_len: int) -> Forecast:
        """As a flow, scaled to the whole job where only some of its rows were read."""
        order = np.array(self._order(config), np.int64)
        is_shared = blocks.enable_prefix_caching and not config.scheduler.reserves
        sharing = self._sharing(order) if is_shared else _nothing_shared(len(order))
        requests = FlowRequests(
            np.array(self.rows.prompt_tokens, np.int64)[order],
            sharing,
            np.array(self.rows.expected_tokens, np.int64)[order],
        )
        found = flow_forecast(requests, config.scheduler, blocks, self.layers_by_window, max_model_len)
        return _scaled(found, self.rows.num_rows / max(1, self.rows.num_read))

    def _order(self, config: JobConfig) -> list[int]:
        """The order in which the requests start."""
        return list(range(self.rows.num_requests))

    def _sharing(self, order: IntArray) -> Sharing:
        found = self.rows.prefixes.sharing(order)
        return Sharing(found.cached[order], found.shared[order], found.groups[order])

    @cached_property
    def servable_tokens(self) -> int:
        """Prompt tokens that the prefix cache serves where it never forgets; the order does not matter."""
        return int(self.rows.prefixes.sharing().cached.sum())


def _nothing_shared(count: int) -> Sharing:
    return Sharing(*(np.zeros(count, np.int64) for _ in range(3)))


def _scaled(forecast: Forecast, factor: float) -> Forecast:
    if factor == 1:
        return forecast
    counts = ("preemptions", "recomputed_tokens", "cached_tokens", "output_tokens")
    whole = {name: round(getattr(forecast, name) * factor) for name in counts}
    return replace(forecast, trace=replace(forecast.trace, repeats=forecast.trace.repeats * factor), **whole)
