"""Which KV blocks hold known contents, and where they are found by these. Owned by block_pool.py."""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from batchinfer.cache.block_run import BlockIds, BlockKey, BlockRun, Link

TOKEN_BYTES = 4
TokenIds = npt.NDArray[np.int32]


class PrefixIndex:
    """Maps a hash of the first block's content to a run of blocks; what is found is compared whole, token ids and
    preceding content included, so a collision only costs hits. Contents are numbered as they become findable; the
    number of a content whose block is reused or dropped never comes back, so that nothing that hung on it is found."""

    def __init__(self, num_blocks: int, block_size: int, hash_function: Callable[[BlockKey], int]) -> None:
        self._num_blocks = num_blocks
        self._block_size = block_size
        self._block_bytes = block_size * TOKEN_BYTES
        self._hash = hash_function
        self._runs = np.full(num_blocks, None, np.object_)  # that have or had them, each a BlockRun or None
        self._places = np.zeros(num_blocks, np.int64)  # in `_runs`, or in `_doubles`
        self._doubles: dict[int, BlockRun] = {}  # runs of equal contents; of blocks that are therefore not findable
        self._all_places = np.arange(num_blocks)
        self._next_number = 1  # 0 has the hash of the empty domain
        self._index: dict[int, BlockRun] = {}  # by the hash of the key

    def run_of(self, block: int) -> BlockRun | None:
        """Of a findable block."""
        run: BlockRun | None = self._runs[block]
        if run is None:
            return None
        place, blocks = self._places[block], run.blocks
        return run if place < len(blocks) and blocks[place] == block else None

    def place_of(self, block: int) -> int:
        """In its run."""
        return int(self._places[block])

    def match(self, token_ids: TokenIds, domain: str) -> list[tuple[BlockRun, int]]:
        """The runs, and how many blocks of each, that hold the longest known beginning of token_ids."""
        run = self._find(domain, token_ids[: self._block_size].tobytes(), 0)
        if run is None:
            return []
        data, num_found, found = self._bytes_of_full_blocks(token_ids), 0, []
        while run is not None:
            count = run.num_common(0, data, num_found)
            found.append((run, count))
            num_found += count
            run = self._find(run.number + count - 1, data, num_found)
        return found

    def register(self, block_ids: BlockIds, token_ids: TokenIds, domain: str, parent: int | None) -> None:
        """See BlockPool.register."""
        data = self._bytes_of_full_blocks(token_ids)
        blocks = block_ids[: len(data) // self._block_bytes]
        if parent is None:
            return self._enter(blocks, data, 0, domain)
        home = self._home(parent)
        if home is None:
            return
        place = int(self._places[parent])
        if home.may_grow_after(place) and home.blocks[place] == parent:
            home.grow(blocks, data)
            return self._note(home, place + 1, blocks)
        start = self._double(home, place + 1, data, 0, blocks)
        home.is_followed |= start < len(blocks) and place + start + 1 == len(home.blocks)
        self._enter(blocks, data, start, home.number + place + start)

    def _enter(self, blocks: BlockIds, data: bytes, start: int, link: Link) -> None:
        """Makes blocks from `start` on findable, the first of them after `link`."""
        while start < len(blocks):
            key = (link, data[start * self._block_bytes : (start + 1) * self._block_bytes])
            hashed = self._hash(key)
            run = self._index.get(hashed)
            if run is None:
                return self._add_run(key, hashed, blocks[start:].copy(), data[start * self._block_bytes :])
            if run.key != key:
                return  # the hashes collide
            count = self._double(run, 0, data, start, blocks)
            start += count
            run.is_followed |= start < len(blocks) and count == len(run.blocks)
            link = run.number + count - 1

    def _add_run(self, key: BlockKey, hashed: int, blocks: BlockIds, data: bytes) -> None:
        run = self._index[hashed] = BlockRun(key, hashed, self._next_number, blocks, data, self._block_bytes)
        self._next_number += self._num_blocks  # it may become as long
        self._note(run, 0, blocks)

    def _note(self, run: BlockRun, start: int, blocks: BlockIds) -> None:
        """These are the run's from place `start` on."""
        self._runs[blocks] = run
        self._places[blocks] = self._all_places[start : start + len(blocks)]
        self.forget_doubles(blocks)

    def _home(self, block: int) -> BlockRun | None:
        """The run that holds the content of a block; None where it is not known or not findable."""
        run = self.run_of(block) or self._doubles.get(block)
        return run if run is not None and self._places[block] < len(run.blocks) else None

    def _double(self, run: BlockRun, place: int, data: bytes, start: int, blocks: BlockIds) -> int:
        """Lets blocks from `start` on lead on to those of a run from `place` on, as far as their contents are equal.
        Returns how many are."""
        count = run.num_common(place, data, start)
        for at, block in enumerate(blocks[start : start + count].tolist(), place):
            self._places[block] = at
            if self.run_of(block) is None:
                self._doubles[block] = run
        return count

    def forget(self, run: BlockRun, start: int) -> BlockIds:
        """Makes a run's blocks from place `start` on unfindable, and returns them."""
        lost, run.blocks = run.blocks[start:], run.blocks[:start].copy()
        if not start:
            del self._index[run.hashed]
            run.data = b""  # the blocks may refer to the run for long
        return lost

    def forget_doubles(self, blocks: BlockIds) -> None:
        """What these held is no longer of interest, or findable itself."""
        for block in blocks.tolist() if self._doubles else ():
            self._doubles.pop(block, None)

    def _find(self, link: Link, data: bytes, start: int) -> BlockRun | None:
        """The run that holds, after `link`, the content of block `start` of data."""
        piece = data[start * self._block_bytes : (start + 1) * self._block_bytes]
        if len(piece) < self._block_bytes:
            return None
        key = (link, piece)
        run = self._index.get(self._hash(key))
        return run if run is not None and run.key == key else None

    def _bytes_of_full_blocks(self, token_ids: TokenIds) -> bytes:
        return token_ids[: len(token_ids) // self._block_size * self._block_size].tobytes()

    def findable_blocks(self) -> set[int]:
        """Raises RuntimeError unless the index agrees with the blocks' contents."""
        homes = {block: self.run_of(block) for block in range(self._num_blocks)}
        findable = {block: (run.hashed, self.place_of(block)) for block, run in homes.items() if run is not None}
        indexed = {
            block: (hashed, place)
            for hashed, run in self._index.items()
            for place, block in enumerate(run.blocks.tolist())
        }
        if indexed != findable:
            raise RuntimeError("the prefix index disagrees with the blocks' contents")
        return set(findable)
