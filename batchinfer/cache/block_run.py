"""A stretch of findable KV blocks whose contents follow each other. Made by prefix_index.py; block_pool.py sees to what
of it is unused."""

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

BlockIds = npt.NDArray[np.int64]
# Where a block's content hangs: on the content before it, by its number, or at a sequence's start, by the domain.
Link = int | str
# A block's whole content: what comes before it and its own int32 token ids.
BlockKey = tuple[Link, bytes]


@dataclass(slots=True, eq=False)
class BlockRun:
    """Blocks each of which hangs on the one before it, so that a long sequence takes one entry of the index. Block i
    holds content number `number` + i. A run grows and loses blocks at its end, but once it has lost some it grows no
    more, so that no number comes back."""

    key: BlockKey  # of the first block
    hashed: int  # the key's hash
    number: int
    blocks: BlockIds
    data: bytes  # token ids of the blocks, and perhaps of some that it has lost
    block_bytes: int  # of data, a block
    is_followed: bool = False  # perhaps another run hangs on its last block
    unused: "dict[UnusedPiece, None]" = field(default_factory=dict)  # in no order

    def may_grow_after(self, place: int) -> bool:
        """Whether the block at `place` is the last it ever had, and nothing else hangs there."""
        num_blocks = len(self.blocks)
        return place + 1 == num_blocks and not self.is_followed and len(self.data) == num_blocks * self.block_bytes

    def grow(self, blocks: BlockIds, data: bytes) -> None:
        self.blocks = np.concatenate([self.blocks, blocks])
        self.data += data

    def num_common(self, place: int, data: bytes, start: int) -> int:
        """How many of the blocks from `place` on hold what `data` has from block `start` on."""
        size, known = self.block_bytes, self.data
        at, offset = place * size, start * size
        low, high = 0, min(len(self.blocks) - place, len(data) // size - start)
        if known[at : at + high * size] == data[offset : offset + high * size]:
            return high
        while low < high - 1:  # the first `low` blocks are equal, the first `high` are not
            middle = (low + high) // 2
            begin, end = low * size, middle * size
            is_equal = known[at + begin : at + end] == data[offset + begin : offset + end]
            low, high = (middle, high) if is_equal else (low, middle)
        return low

    def num_together(self, last: int, block_ids: BlockIds, stop: int) -> int:
        """How many of block_ids up to `stop`, the last of which is the block before place `last`, stand in a row here:
        as many as there are on both sides, else 1."""
        count = min(last, stop)
        first, start = last - count, stop - count
        # Ids in another order seldom begin alike; to compare all of them for each would take long.
        if block_ids[start] != self.blocks[first]:
            return 1
        return count if block_ids[start:stop].tobytes() == self.blocks[first:last].tobytes() else 1


@dataclass(slots=True, eq=False)
class UnusedPiece:
    """Blocks of a run that nobody holds, from place `start` to `stop`: they were given back together, the last of them
    first."""

    run: BlockRun
    start: int
    stop: int
