"""Cutting a step in two when the device has no memory for the whole of it. Used by the model runner.

Halves may run one after the other because a step only reads KV that it writes itself or that is there already, and
what is read stands before its reader in batch order.
"""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from batchinfer.scheduler_output import SchedulerOutput


def halves(output: SchedulerOutput) -> Iterator[SchedulerOutput]:
    """The step's first and last sequences; of a single sequence its first tokens, which sample nothing, and its last
    ones. Raises ValueError for a step of one token."""
    num_seqs = len(output.slots)
    if num_seqs > 1:
        yield _some(output, slice(0, num_seqs // 2))
        yield _some(output, slice(num_seqs // 2, num_seqs))
        return
    if output.num_tokens < 2:
        raise ValueError("a step of one token has no halves")
    first = output.num_scheduled_tokens // 2
    yield replace(output, num_scheduled_tokens=first, samples=np.zeros(1, np.bool_))
    yield replace(
        output,
        num_scheduled_tokens=output.num_scheduled_tokens - first,
        num_computed_tokens=output.num_computed_tokens + first,
    )


def _some(output: SchedulerOutput, part: slice) -> SchedulerOutput:
    return replace(
        output,
        slots=output.slots[part],
        num_scheduled_tokens=output.num_scheduled_tokens[part],
        num_computed_tokens=output.num_computed_tokens[part],
        samples=output.samples[part],
    )
