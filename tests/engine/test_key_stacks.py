"""Which sequences attend to their first keys together: against every way of cutting the sorted ones, and in the engine
on a fake device."""

import itertools
import random

import numpy as np
import pytest
from batchinfer.kernels.paged_attention.segments import segment_keys

from batchinfer.engine.key_stacks import KeyStacks, _cut
from batchinfer.engine.persistent_batch import StepInputs

BLOCK = 128


def inputs(tables, seq_lens, q_lens=None):
    counts = np.array(q_lens or [1] * len(tables))
    width = max(map(len, tables))
    nothing = np.zeros(0, np.int64)
    return StepInputs(
        token_ids=nothing,
        positions=nothing,
        slot_mapping=nothing,
        block_table=np.array([[*table, *[0] * (width - len(table))] for table in tables], np.int32),
        cu_seqlens_q=np.concatenate([[0], counts.cumsum()]).astype(np.int32),
        seq_lens=np.array(seq_lens, np.int32),
        logits_indices=nothing,
    )


def groups(stacks):
    """{members: segments} of the stacks, each of which is the same for all its members."""
    found = {}
    for row, (segments, *members) in enumerate(stacks.tolist()):
        members = tuple(member for member in members if member >= 0)
        assert row in members
        if segments:
            assert found.setdefault(members, segments) == segments
        else:
            assert members == (row,)
    assert sorted(set(itertools.chain(*found))) == sorted(itertools.chain(*found))
    return found


def common_segments(tables, lens, prompts, members):
    """Whole segments before the last token, within the prompts, of which all have every block."""
    (keys,) = {int(segment_keys(np.array(lens[member]))) for member in members}
    most = min(min(lens[member] - 1, prompts[member]) // keys for member in members)
    for segment in range(most):
        end = (segment + 1) * keys // BLOCK
        if len({tuple(tables[member][:end]) for member in members}) > 1:
            return segment
    return most


@pytest.mark.parametrize("seed", range(10))
def test_stacks_share_what_they_say(seed):
    """Sequences fork from each other at random places; some compute a chunk, some have segments of 1,024 keys."""
    rng = random.Random(seed)
    blocks, tables = iter(range(1, 10**6)), []
    for _ in range(30):
        parent = rng.choice(tables) if tables and rng.random() < 0.8 else []
        own = rng.randrange(1, 12) if rng.random() < 0.8 else rng.randrange(128, 140)
        tables.append(parent[: rng.randrange(len(parent) + 1)] + [next(blocks) for _ in range(own)])
    rng.shuffle(tables)
    lens = [len(table) * BLOCK - rng.randrange(BLOCK) for table in tables]
    prompts = [length - rng.randrange(min(length, 300)) for length in lens]
    q_lens = [1 if rng.random() < 0.9 else 2 for _ in tables]
    for size in (2, 4, 16):
        found = groups(KeyStacks(size, BLOCK).of(inputs(tables, lens, q_lens), np.array(prompts, np.int32)))
        assert found
        for members, segments in found.items():
            assert 1 < len(members) <= size
            assert all(q_lens[member] == 1 for member in members)
            assert segments == common_segments(tables, lens, prompts, members)


@pytest.mark.parametrize("seed", range(10))
def test_cuts_save_the_most(seed):
    """Against all ways to cut a run into stacks."""
    rng = random.Random(seed)
    common, most = [rng.randint(1, 6) for _ in range(rng.randint(1, 8))], rng.randint(2, 5)
    best = 0
    for bits in itertools.product((False, True), repeat=len(common)):
        stacks, total = "".join("1" if joined else "0" for joined in bits).split("0"), 0
        place = 0
        for joined in stacks:
            if joined:
                total += len(joined) * min(common[place : place + len(joined)])
            place += len(joined) + 1
        if max(map(len, stacks)) < most:
            best = max(best, total)
    cuts = _cut(common, most)
    assert sum((size - 1) * shared for _, size, shared in cuts) == best
    for first, size, shared in cuts:
        assert shared == min(common[first : first + size - 1])
        assert 1 < size <= most


def test_a_common_prompt_is_cut_into_full_stacks():
    shared = list(range(1, 9))
    tables = [[*shared, 100 + row] for row in range(10)]
    stacks = KeyStacks(4, BLOCK).of(inputs(tables, [1030] * 10), np.full(10, 1024, np.int32))
    assert sorted(map(len, groups(stacks))) == [2, 4, 4]
    assert set(groups(stacks).values()) == {2}


def test_a_last_token_and_what_follows_the_prompt_are_never_shared():
    tables = [[1, 2, 3, 4, 5], [1, 2, 3, 4]]
    for lens, prompts in (([520, 512], [600, 600]), ([520, 513], [511, 600])):
        assert groups(KeyStacks(4, BLOCK).of(inputs(tables, lens), np.array(prompts, np.int32))) == {}
    enough = KeyStacks(4, BLOCK).of(inputs(tables, [520, 513]), np.array([512, 513], np.int32))
    assert set(map(frozenset, groups(enough))) == {frozenset({0, 1})}


def test_blocks_in_between_count():
    """The last block of a segment is the same, and one before it is a copy: nothing is taken for granted."""
    stacks = KeyStacks(4, BLOCK).of(inputs([[1, 2, 3, 4, 5], [1, 9, 3, 4, 6]], [600, 600]), np.full(2, 600, np.int32))
    assert groups(stacks) == {}


def test_stacks_are_kept_until_something_changes():
    tables, prompts = [[1, 2, 3, 4, 5], [1, 2, 3, 4, 6]], np.full(2, 520, np.int32)
    finder = KeyStacks(4, BLOCK)
    first = finder.of(inputs(tables, [600, 620]), prompts)
    grown = [[*table, 50 + row] for row, table in enumerate(tables)]
    assert finder.of(inputs(grown, [641, 660]), prompts) is first
    other = finder.of(inputs([[7, 8, 9, 10, 11], tables[1]], [600, 620]), prompts)
    assert groups(other) == {}
    assert len(groups(finder.of(inputs(tables, [600, 620]), prompts))) == 1


def test_it_is_off_where_it_cannot_pay():
    assert KeyStacks.make(32, 8, 16).width == 1 + 4
    assert KeyStacks.make(9, 3, 16).width == 1 + 5
    assert KeyStacks.make(48, 1, 16) is None  # a tile of 64 rows holds one sequence
    assert KeyStacks.make(9, 1, 16) is None  # and one of 16 too
    assert KeyStacks.make(32, 8, 24) is None  # blocks that lie across segments
    assert KeyStacks(4, 16).alone(2).tolist() == [[0, 0, -1, -1, -1], [0, 1, -1, -1, -1]]


@pytest.mark.parametrize(
    ("prompt", "shared", "before", "after"),
    [(15_500, 15_360, (16_384, 16_384), (16_385, 16_385)), (2_100, 2_048, (16_384, 16_000), (16_385, 16_001))],
    ids=["both pass into longer segments", "one does"],
)
def test_stacks_are_made_anew_where_segments_grow(prompt, shared, before, after):
    """The same keys are other segments then, though tables and what may be shared stay the same."""
    common = list(range(1, shared // BLOCK + 1))
    width = -(-17_000 // BLOCK)
    tables = [common + [1000 * n + i for i in range(width - len(common))] for n in (1, 2)]
    prompts = np.full(2, prompt, np.int32)
    stacks = KeyStacks(4, BLOCK)
    stacks.of(inputs(tables, before), prompts)
    kept, fresh = stacks.of(inputs(tables, after), prompts), KeyStacks(4, BLOCK).of(inputs(tables, after), prompts)
    assert kept.tolist() == fresh.tolist()
