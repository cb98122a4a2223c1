"""Which sequences a numerical fault reaches: those whose numbers broke, and those that read the KV these wrote. Called
by the scheduler at commit."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from batchinfer.cache.block_pool import BlockPool
from batchinfer.scheduling.running_table import RunningTable
from batchinfer.scheduling.steps import StepInFlight
from batchinfer.sequence import Sequence, SequenceStatus


@dataclass(frozen=True, slots=True)
class FaultTrace:
    """Sources broke by themselves. Readers shared a block that a source wrote in the faulty step, in the same step or
    in a later one in flight: what they computed since is worthless, but alone they may be well."""

    sources: list[Sequence]
    readers: list[Sequence]
    spoilt_blocks: list[int]  # to be dropped: all blocks of sources, and what readers wrote after a spoilt block


def trace_faults(
    step: StepInFlight, is_finite: npt.NDArray[np.bool_], table: RunningTable, pool: BlockPool
) -> FaultTrace:
    """Follows the non-finite entries of a step through the shared blocks.

    A source's earlier blocks are dropped too, though its own steps over them were finite: an infinite key hides behind
    a score of minus infinity until some query meets it with the other sign.
    """
    entries = [i for i in np.flatnonzero(~is_finite).tolist() if step.sequences[i] not in step.cancelled]
    written = _written_blocks(step, entries, table.block_size)
    poison = {b for slot, (first, stop) in written.items() for b in table.block_tables[slot][first:stop]}
    shared = any(pool.ref_count(block) > 1 for block in poison)
    reading_slots = _reading_slots(table, poison, written) if shared else {}
    spoilt = [b for slot in written for b in table.block_tables[slot] if slot not in reading_slots]
    spoilt += [b for slot, first in reading_slots.items() for b in table.block_tables[slot][first:]]
    sources = [step.sequences[i] for i in entries if int(step.output.slots[i]) not in reading_slots]
    readers = [s for slot in reading_slots if (s := table.sequences[slot]) is not None and s not in sources]
    return FaultTrace(sources, readers, spoilt)


def _written_blocks(step: StepInFlight, entries: list[int], block_size: int) -> dict[int, tuple[int, int]]:
    """slot -> range of its blocks that the step wrote to."""
    output = step.output
    starts = output.num_computed_tokens[entries]
    stops = starts + output.num_scheduled_tokens[entries]
    ranges = zip((starts // block_size).tolist(), (-(-stops // block_size)).tolist(), strict=True)
    return dict(zip(output.slots[entries].tolist(), ranges, strict=True))


def _reading_slots(table: RunningTable, poison: set[int], written: dict[int, tuple[int, int]]) -> dict[int, int]:
    """slot -> index of its first block that another sequence poisoned."""
    readers = {}
    for slot, sequence in enumerate(table.sequences):
        if sequence is None or not _is_live(sequence, slot):
            continue
        blocks = table.block_tables[slot]
        not_its_own = blocks[: written[slot][0]] if slot in written else blocks
        first = next((i for i, block in enumerate(not_its_own) if block in poison), None)
        if first is not None:
            readers[slot] = first
    return readers


def _is_live(sequence: Sequence, slot: int) -> bool:
    """The slot's sequence runs in it, or was preempted and still awaits a token of a step in flight."""
    if sequence.status is SequenceStatus.RUNNING:
        return sequence.slot == slot
    return sequence.status is SequenceStatus.WAITING and sequence.num_in_flight_tokens > 0
