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
    in a later one in flight: what they computed since is worthless, but alone they may be well. A sequence preempted in
    the middle of its prompt may have broken in its old slot and read that again in its new one: it is in both lists."""

    sources: list[Sequence]
    readers: list[Sequence]
    spoilt_blocks: list[int]  # all blocks of sources; what readers wrote hangs on them, so it is lost with them


def trace_faults(
    step: StepInFlight, is_finite: npt.NDArray[np.bool_], table: RunningTable, pool: BlockPool
) -> FaultTrace:
    """Follows the non-finite entries of a step through the shared blocks.

    A source's earlier blocks are dropped too, though its own steps over them were finite: an infinite key hides behind
    a score of minus infinity until some query meets it with the other sign.
    """
    sequences = table.sequences_in(step.slots)
    entries = [i for i in np.flatnonzero(~is_finite).tolist() if sequences[i] not in step.cancelled]
    written = _written_blocks(step, entries, table.block_size)
    poison = {b for slot, (first, stop) in written.items() for b in table.blocks_of(slot)[first:stop].tolist()}
    shared = any(pool.ref_count(block) > 1 for block in poison)
    reading_slots = _reading_slots(table, poison, written) if shared else []
    spoilt = [b for slot in written for b in table.blocks_of(slot).tolist() if slot not in reading_slots]
    sources = [sequences[i] for i in entries if int(step.output.slots[i]) not in reading_slots]
    readers = [table.sequence_in(slot) for slot in reading_slots]
    return FaultTrace(sources, readers, spoilt)


def _written_blocks(step: StepInFlight, entries: list[int], block_size: int) -> dict[int, tuple[int, int]]:
    """slot -> range of its blocks that the step wrote to."""
    output = step.output
    starts = output.num_computed_tokens[entries]
    stops = starts + output.num_scheduled_tokens[entries]
    ranges = zip((starts // block_size).tolist(), (-(-stops // block_size)).tolist(), strict=True)
    return dict(zip(output.slots[entries].tolist(), ranges, strict=True))


def _reading_slots(table: RunningTable, poison: set[int], written: dict[int, tuple[int, int]]) -> list[int]:
    """Slots that hold a block which another sequence poisoned."""
    readers = []
    for slot, sequence in enumerate(table.sequences):
        if sequence is None or sequence.status is SequenceStatus.FINISHED:
            continue
        blocks = table.blocks_of(slot).tolist()
        not_its_own = blocks[: written[slot][0]] if slot in written else blocks
        if not poison.isdisjoint(not_its_own):
            readers.append(slot)
    return readers
