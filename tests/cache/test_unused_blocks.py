import random
from collections import OrderedDict

import numpy as np
import pytest

from batchinfer.cache.block_run import BlockRun
from batchinfer.cache.unused_blocks import UnusedBlocks

LENGTH = 12  # of each run
Record = OrderedDict[int, None]  # unused blocks, the least recently used first


def make_run(number: int) -> BlockRun:
    """Its block at place i is 100 * number + i."""
    return BlockRun(("", b""), number, 1 + LENGTH * number, 100 * number + np.arange(LENGTH), b"", 4)


def add(unused: UnusedBlocks, record: Record, run: BlockRun, rng: random.Random) -> None:
    """Gives back a stretch of the run, some of whose blocks others hold still."""
    start = rng.randrange(len(run.blocks))
    stop = rng.randrange(start, len(run.blocks)) + 1
    while any(block in record for block in run.blocks[start:stop]):  # nobody can give back what nobody holds
        stop -= 1
    if start == stop:
        return
    references = [rng.choice([0, 0, 0, 2]) for _ in range(start, stop)]
    freed = [block for block, count in zip(run.blocks[start:stop].tolist(), references, strict=True) if count == 0]
    unused.add(run, start, references)
    record.update(dict.fromkeys(reversed(freed)))


def use(unused: UnusedBlocks, record: Record, run: BlockRun, rng: random.Random) -> None:
    stop = rng.randrange(1, len(run.blocks) + 1)
    unused.use(run, stop)
    for block in run.blocks[:stop]:
        record.pop(block, None)


def take_from(unused: UnusedBlocks, record: Record, run: BlockRun, rng: random.Random) -> None:
    start = rng.randrange(len(run.blocks))
    taken = [place for place in range(LENGTH - 1, start - 1, -1) if run.blocks[0] + place in record]
    assert unused.take_from(run, start) == taken
    for place in taken:
        del record[run.blocks[place]]


def shorten_oldest(unused: UnusedBlocks, record: Record, run: BlockRun, rng: random.Random) -> None:
    if not record:
        return
    piece = unused.oldest()
    assert piece.run.blocks[piece.stop - 1] == next(iter(record))
    stop = rng.randrange(piece.start, piece.stop)
    for _ in range(stop, piece.stop):
        record.popitem(last=False)
    unused.shorten(piece, stop)


@pytest.mark.parametrize("seed", range(20))
def test_random_use_against_a_plain_record_of_each_block(seed: int) -> None:
    rng = random.Random(seed)
    unused, record = UnusedBlocks(), Record()
    runs = [make_run(number) for number in range(3)]
    longest = 0
    for _ in range(500):
        action = rng.choice([add, add, add, use, take_from, shorten_oldest])
        action(unused, record, rng.choice(runs), rng)
        assert list(unused) == list(record)
        assert len(unused) == len(record)
        for run in runs:
            places = [place for piece in run.unused for place in range(piece.start, piece.stop)]
            assert sorted(run.blocks[place] for place in places) == sorted(set(run.blocks.tolist()) & set(record))
        longest = max(longest, len(record))
    assert longest > LENGTH


def test_blocks_that_come_one_by_one_from_the_end_are_one_piece() -> None:
    unused, run, other = UnusedBlocks(), make_run(0), make_run(1)
    for place in (11, 10, 9):
        unused.add(run, place, [0])
    assert [(piece.start, piece.stop) for piece in run.unused] == [(9, 12)]
    unused.add(other, 8, [0])
    unused.add(run, 8, [0])  # was used later than the other run's
    unused.add(run, 6, [0])  # place 7 is held
    assert [(piece.start, piece.stop) for piece in run.unused] == [(9, 12), (8, 9), (6, 7)]
    assert list(unused) == [11, 10, 9, 108, 8, 6]


def test_blocks_held_by_others_part_what_is_given_back() -> None:
    unused, run = UnusedBlocks(), make_run(0)
    unused.add(run, 2, [0, 1, 0, 0, 3])
    assert list(unused) == [5, 4, 2]
    unused.use(run, 5)
    assert list(unused) == [5]
