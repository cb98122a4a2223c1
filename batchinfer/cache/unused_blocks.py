"""KV blocks that nobody holds, empty ones and findable ones, in the order in which they are to be reused. Owned by
block_pool.py."""

from collections import OrderedDict
from collections.abc import Iterator

import numpy as np

from batchinfer.cache.block_run import BlockIds, BlockRun, UnusedPiece


class EmptyBlocks:
    """Blocks of no known content: first those given back last, then those never used, in ascending order."""

    def __init__(self, num_blocks: int) -> None:
        self._ids = np.arange(num_blocks)[::-1].copy()  # a stack: the next one stands last
        self._num_blocks = num_blocks

    def __len__(self) -> int:
        return self._num_blocks

    def __iter__(self) -> Iterator[int]:
        return reversed(self._ids[: self._num_blocks].tolist())

    def take(self, count: int) -> BlockIds:
        """So many, or all where there are fewer."""
        top = self._num_blocks
        self._num_blocks = max(0, top - count)
        return self._ids[self._num_blocks : top][::-1].copy()

    def give_back(self, block: int) -> None:
        self._ids[self._num_blocks] = block
        self._num_blocks += 1


class UnusedBlocks:
    """Least recently used first. They are kept by the piece of a run, so that a long prompt costs one entry if it comes
    or goes whole, or block by block from its end."""

    def __init__(self) -> None:
        self._pieces: OrderedDict[UnusedPiece, None] = OrderedDict()
        self._num_blocks = 0

    def __len__(self) -> int:
        return self._num_blocks

    def __iter__(self) -> Iterator[int]:
        for piece in self._pieces:
            yield from reversed(piece.run.blocks[piece.start : piece.stop].tolist())

    def add(self, run: BlockRun, start: int, references: list[int]) -> None:
        """Those of the run's blocks from place `start` on that have no references left; the last ones are to go first.
        references: of each; the list may be emptied."""
        while 0 in references:
            while references[-1]:
                references.pop()
            stop = start + len(references)
            while references and not references[-1]:
                references.pop()
            self.add_piece(run, start + len(references), stop)

    def add_piece(self, run: BlockRun, start: int, stop: int) -> None:
        """Those of the run's blocks from place `start` to `stop`: they have no references left."""
        self._num_blocks += stop - start
        newest = next(reversed(self._pieces), None)
        if newest is not None and newest.run is run and newest.start == stop:
            newest.start = start
            return
        piece = UnusedPiece(run, start, stop)
        run.unused[piece] = self._pieces[piece] = None

    def use(self, run: BlockRun, stop: int) -> None:
        """The run's blocks up to place `stop` are held again."""
        for piece in [piece for piece in run.unused if piece.start < stop]:
            if piece.stop <= stop:
                self.shorten(piece, piece.start)
            else:
                self._num_blocks -= stop - piece.start
                piece.start = stop

    def oldest(self) -> UnusedPiece:
        """There must be one."""
        return next(iter(self._pieces))

    def shorten(self, piece: UnusedPiece, stop: int) -> None:
        """Takes out what the piece has from place `stop` on."""
        self._num_blocks -= piece.stop - max(stop, piece.start)
        piece.stop = stop
        if stop <= piece.start:
            del self._pieces[piece], piece.run.unused[piece]

    def take_from(self, run: BlockRun, start: int) -> list[int]:
        """Takes out the run's blocks from place `start` on; their places, the last first."""
        taken: list[int] = []
        pieces = [piece for piece in run.unused if piece.stop > start]
        for piece in sorted(pieces, key=lambda piece: -piece.start):
            taken += range(piece.stop - 1, max(piece.start, start) - 1, -1)
            self.shorten(piece, start)
        return taken
