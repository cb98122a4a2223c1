import random
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest

from batchinfer.cache.block_pool import BlockPool
from batchinfer.config import SchedulerConfig
from batchinfer.engine.persistent_batch import PersistentBatch, StepInputs
from batchinfer.request import Request, RequestId, SamplingParams
from batchinfer.scheduler_output import SchedulerOutput, StartedSequence, StepResult
from batchinfer.scheduling.scheduler import Scheduler
from batchinfer.sequence import Sequence


def make_request(prompt: list[int], max_tokens: int = 5) -> Request:
    return Request(RequestId(0, 0), np.array(prompt, np.int32), SamplingParams(), max_tokens, 0)


def make_output(
    step_id: int,
    entries: list[tuple[int, int, int, bool]],  # slot, computed, scheduled, samples
    released: tuple[int, ...] = (),
    started: tuple[StartedSequence, ...] = (),
    appended: tuple[tuple[int, int, int], ...] = (),  # slot, place, block
) -> SchedulerOutput:
    slots, computed, scheduled, samples = (np.array(column) for column in zip(*entries, strict=True))
    slots, computed, scheduled = (a.astype(np.int32) for a in (slots, computed, scheduled))
    blocks = np.array(appended, np.int32).reshape(-1, 3).T
    return SchedulerOutput(step_id, released, started, blocks, slots, scheduled, computed, samples)


def start(slot: int, tokens: list[int], blocks: tuple[int, ...], num_computed: int = 0) -> StartedSequence:
    return StartedSequence(
        slot, make_request(tokens), np.array(tokens, np.int32), np.array(blocks, np.int32), num_computed
    )


def as_lists(inputs: StepInputs) -> dict[str, list[object]]:
    assert inputs.late_slots is None
    names = [name for name in StepInputs.__dataclass_fields__ if name != "late_slots"]
    return {name: getattr(inputs, name).tolist() for name in names}


def test_a_chunk_beside_a_decode_worked_out_by_hand() -> None:
    batch = PersistentBatch(max_num_seqs=4, max_model_len=16, block_size=4)
    first = make_output(0, [(2, 0, 3, True)], started=(start(2, [10, 11, 12], (5,)),))
    batch.apply(first)
    assert as_lists(batch.build(first)) == {
        "token_ids": [10, 11, 12],
        "positions": [0, 1, 2],
        "slot_mapping": [20, 21, 22],
        "block_table": [[5]],
        "cu_seqlens_q": [0, 3],
        "seq_lens": [3],
        "logits_indices": [2],
    }
    batch.append_sampled(first.slots, np.array([13], np.int32))
    prompt = start(0, [20, 21, 22, 23, 24, 25, 26, 27, 28], (7, 1, 3), num_computed=4)
    second = make_output(1, [(2, 3, 1, True), (0, 4, 4, False)], started=(prompt,))
    batch.apply(second)
    assert as_lists(batch.build(second)) == {
        "token_ids": [13, 24, 25, 26, 27],
        "positions": [3, 4, 5, 6, 7],
        "slot_mapping": [23, 4, 5, 6, 7],
        "block_table": [[5, 0], [7, 1]],
        "cu_seqlens_q": [0, 1, 5],
        "seq_lens": [4, 8],
        "logits_indices": [0],
    }
    batch.append_sampled(second.slots, np.array([14, -1], np.int32))
    third = make_output(2, [(2, 4, 1, True), (0, 8, 1, True)], appended=((2, 1, 9),))
    batch.apply(third)
    assert as_lists(batch.build(third)) == {
        "token_ids": [14, 28],
        "positions": [4, 8],
        "slot_mapping": [36, 12],
        "block_table": [[5, 9, 0], [7, 1, 3]],
        "cu_seqlens_q": [0, 1, 2],
        "seq_lens": [5, 9],
        "logits_indices": [0, 1],
    }


def test_a_slot_used_again_keeps_nothing_of_its_last_sequence() -> None:
    batch = PersistentBatch(2, 16, 2)
    output = make_output(0, [(0, 0, 5, True)], started=(start(0, [1, 2, 3, 4, 5], (3, 4, 5)),))
    batch.apply(output)
    batch.append_sampled(output.slots, np.array([6], np.int32))
    begins = (start(0, [7], (1,)), start(1, [8, 9, 9], (6, 2)))
    again = make_output(1, [(0, 0, 1, True), (1, 0, 3, True)], released=(0,), started=begins)
    batch.apply(again)
    inputs = batch.build(again)
    assert inputs.block_table.tolist() == [[1, 0], [6, 2]]
    assert inputs.token_ids.tolist() == [7, 8, 9, 9]


def test_a_token_that_is_not_known_yet_is_refused() -> None:
    batch = PersistentBatch(2, 16, 4)
    output = make_output(0, [(0, 0, 2, True)], started=(start(0, [1, 2], (0,)),))
    batch.apply(output)
    ahead = make_output(1, [(0, 2, 1, True)])
    batch.apply(ahead)
    with pytest.raises(ValueError, match="step 1 computes tokens that are not sampled yet"):
        batch.build(ahead)


def test_tokens_of_steps_in_flight_are_left_to_the_device() -> None:
    """Two steps ahead: the host knows neither of the two tokens that a step in flight samples in slot 2."""
    batch = PersistentBatch(4, 16, 4)
    first = make_output(0, [(2, 0, 2, True)], started=(start(2, [10, 11], (5,)),))
    batch.apply(first)
    batch.expect(first.slots)
    second = make_output(1, [(2, 2, 1, True), (0, 0, 3, True)], started=(start(0, [20, 21, 22], (7,)),))
    batch.apply(second)
    inputs = batch.build(second)
    assert inputs.token_ids.tolist() == [-1, 20, 21, 22]
    assert inputs.late_slots is not None
    assert inputs.late_slots.tolist() == [2, 0, 0, 0]
    assert inputs.positions.tolist() == [2, 0, 1, 2]
    assert inputs.slot_mapping.tolist() == [22, 28, 29, 30]
    batch.expect(second.slots)
    assert batch.in_flight(np.array([2, 0, 1])).tolist() == [2, 1, 0]
    third = make_output(2, [(2, 3, 1, True), (0, 3, 1, True)])
    batch.apply(third)
    assert batch.build(third).token_ids.tolist() == [-1, -1]
    batch.append_sampled(first.slots, np.array([12], np.int32))
    batch.append_sampled(second.slots, np.array([13, 23], np.int32))
    known = batch.build(third)
    assert known.token_ids.tolist() == [13, 23]
    assert known.late_slots is None


def test_the_device_knows_the_last_token_of_a_slot_only() -> None:
    batch = PersistentBatch(2, 16, 4)
    output = make_output(0, [(0, 0, 2, True)], started=(start(0, [1, 2], (0,)),))
    batch.apply(output)
    batch.expect(output.slots)
    batch.expect(output.slots)
    with pytest.raises(ValueError, match="step 1 computes tokens that are not sampled yet"):
        batch.build(make_output(1, [(0, 2, 1, True)]))  # the token before the last
    with pytest.raises(ValueError, match="step 2 computes tokens that are not sampled yet"):
        batch.build(make_output(2, [(0, 4, 1, True)]))  # one that nobody samples


def test_dtypes_are_those_that_the_forward_pass_takes() -> None:
    batch = PersistentBatch(2, 16, 4)
    output = make_output(0, [(0, 0, 2, True)], started=(start(0, [1, 2], (0,)),))
    batch.apply(output)
    inputs = batch.build(output)
    int64 = ("token_ids", "positions", "slot_mapping", "logits_indices")
    assert [getattr(inputs, name).dtype for name in int64] == [np.int64] * 4
    assert [getattr(inputs, name).dtype for name in ("block_table", "cu_seqlens_q", "seq_lens")] == [np.int32] * 3


def test_slots_beyond_int32_do_not_wrap() -> None:
    """Case 49: block id * block_size passes 2^31."""
    batch = PersistentBatch(1, 1024, 1024)
    output = make_output(0, [(0, 0, 1, True)], started=(start(0, [1], (3_000_000,)),))
    batch.apply(output)
    assert batch.build(output).slot_mapping.tolist() == [3_072_000_000]


@pytest.mark.parametrize("seed", range(10))
def test_steps_of_the_scheduler_against_plain_loops(seed: int) -> None:
    """Runs a scheduler with preemptions; the plain side reads tokens and blocks from the sequences themselves."""
    rng = random.Random(seed)
    block_size = rng.choice([1, 3, 4])
    pool = BlockPool(-(-30 // block_size), block_size)
    config = SchedulerConfig(max_num_batched_tokens=rng.choice([3, 40]), max_num_seqs=4, admission="greedy")
    scheduler = Scheduler(config, pool)
    batch = PersistentBatch(4, 30, block_size)
    sequences = []
    for _ in range(12):
        prompt = [1, 2, 3, 4][: rng.randrange(5)] + [rng.randrange(99) for _ in range(rng.randrange(1, 9))]
        sequences.append(Sequence(make_request(prompt, rng.randrange(1, 30 - len(prompt))), 0.0))
        scheduler.add(sequences[-1])
    running: dict[int, Sequence] = {}
    while scheduler.has_unfinished:
        output = scheduler.schedule()
        assert output is not None
        running = {s.slot: s for s in sequences if s.slot >= 0}
        batch.apply(output)
        compare(batch.build(output), output, running, scheduler._table.blocks_of, block_size)
        token_ids = np.where(output.samples, [rng.randrange(99) for _ in output.slots], -1).astype(np.int32)
        batch.append_sampled(output.slots, token_ids)
        outcome = scheduler.commit(output, StepResult(output.step_id, token_ids, np.ones(len(token_ids), bool)))
        for sequence, _ in outcome.sampled:
            if sequence.num_confirmed_tokens == sequence.max_num_tokens:
                scheduler.finish(sequence, "length")
    assert sum(s.num_preemptions for s in sequences) > 0


def compare(
    inputs: StepInputs,
    output: SchedulerOutput,
    running: dict[int, Sequence],
    blocks_of: Callable[[int], npt.NDArray[np.int64]],
    block_size: int,
) -> None:
    tokens: list[int] = []
    positions: list[int] = []
    cells: list[int] = []
    ends = [0]
    for i, slot in enumerate(output.slots.tolist()):
        sequence, blocks = running[slot], blocks_of(slot).tolist()
        known = sequence.request.prompt_token_ids.tolist() + sequence.output_token_ids
        stop = int(output.num_computed_tokens[i] + output.num_scheduled_tokens[i])
        for position in range(int(output.num_computed_tokens[i]), stop):
            tokens.append(known[position])
            positions.append(position)
            cells.append(blocks[position // block_size] * block_size + position % block_size)
        ends.append(len(tokens))
        assert inputs.seq_lens[i] == stop
        num_blocks = -(-stop // block_size)
        assert inputs.block_table[i, :num_blocks].tolist() == blocks[:num_blocks]
        assert not inputs.block_table[i, num_blocks:].any()
        assert bool(output.samples[i]) == (stop == len(known))
    assert inputs.token_ids.tolist() == tokens
    assert inputs.positions.tolist() == positions
    assert inputs.slot_mapping.tolist() == cells
    assert inputs.cu_seqlens_q.tolist() == ends
    assert inputs.logits_indices.tolist() == [end - 1 for end, s in zip(ends[1:], output.samples, strict=True) if s]
