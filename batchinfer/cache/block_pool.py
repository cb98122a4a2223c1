"""Who holds which KV block, and which blocks can be shared because their contents are known. Moves integers only; the
scheduler is its one caller, paged_kv owns the bytes."""

from collections.abc import Callable
from collections.abc import Sequence as Ids

import numpy as np
import numpy.typing as npt

from batchinfer.cache.block_run import BlockKey, BlockRun, Link
from batchinfer.cache.unused_blocks import UnusedBlocks

TOKEN_BYTES = 4
_NOTHING = 0  # no content's number


class OutOfBlocks(Exception):
    """More blocks were asked for than are free."""


def key_domain(**parts: str) -> str:
    """The domain of KV contents that depend on more than the tokens, as in key_domain(adapter="x", salt="y").

    Each part bears its name, so that an adapter named like a salt is another domain.
    """
    return repr(sorted(parts.items()))


class BlockPool:
    """Ids 0 to num_blocks - 1 of KV blocks of `block_size` tokens, with reference counts and a prefix index.

    A block is used (referenced), cached (unreferenced, still findable by its content) or empty. Cached blocks count as
    free: the least recently used one is taken once no empty block is left. Never used blocks are handed out in
    ascending order, so that memory is touched only as far as it is needed.

    The index maps a hash of the first block's content to a run of blocks; what is found is compared whole, token ids
    and preceding content included, so a collision only costs hits. Contents are numbered as they become findable; the
    number of a content whose block is reused or dropped never comes back, so that nothing that hung on it is found.

    hash_function: replaceable so that tests can force collisions.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        enable_prefix_caching: bool = True,
        hash_function: Callable[[BlockKey], int] = hash,
    ) -> None:
        if num_blocks < 1 or block_size < 1:
            raise ValueError(f"num_blocks = {num_blocks}, block_size = {block_size}: must be 1 or more")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self._block_bytes = block_size * TOKEN_BYTES
        self._hash = hash_function
        self._ref_counts = [0] * num_blocks
        self._runs: list[BlockRun | None] = [None] * num_blocks  # that have or had them
        self._doubles: dict[int, BlockRun] = {}  # runs of equal contents; of blocks that are therefore not findable
        self._places = [0] * num_blocks  # in `_runs`, or in `_doubles`
        self._last_number = _NOTHING
        self._index: dict[int, BlockRun] = {}  # by the hash of the key
        self._next_fresh = 0
        self._recycled: list[int] = []  # empty, used before
        self._cached = UnusedBlocks()

    @property
    def num_free_blocks(self) -> int:
        """Blocks that `allocate` can give: empty and cached."""
        return self.num_blocks - self._next_fresh + len(self._recycled) + len(self._cached)

    @property
    def num_cached_blocks(self) -> int:
        """Unreferenced blocks that are still findable."""
        return len(self._cached)

    @property
    def num_used_blocks(self) -> int:
        return self.num_blocks - self.num_free_blocks

    def num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def ref_count(self, block_id: int) -> int:
        return self._ref_counts[block_id]

    def held_by(self, count: int, block_ids: Ids[int]) -> list[int]:
        """Those of the blocks that have so many references."""
        ref_counts = self._ref_counts
        return [block for block in block_ids if ref_counts[block] == count]

    def allocate(self, num_blocks: int) -> list[int]:
        """Takes blocks of undefined content, one reference each. Raises OutOfBlocks, taking none."""
        if num_blocks > self.num_free_blocks:
            raise OutOfBlocks(f"{num_blocks} KV blocks asked for, {self.num_free_blocks} of {self.num_blocks} are free")
        blocks = self._recycled[: -num_blocks - 1 : -1]
        del self._recycled[len(self._recycled) - len(blocks) :]
        first = self._next_fresh
        self._next_fresh = min(first + num_blocks - len(blocks), self.num_blocks)
        blocks += range(first, self._next_fresh)
        if len(blocks) < num_blocks:
            blocks += self._evict(num_blocks - len(blocks))
        ref_counts = self._ref_counts
        for block in blocks:
            ref_counts[block] = 1
        for block in blocks if self._doubles else ():
            self._doubles.pop(block, None)
        return blocks

    def _evict(self, num_blocks: int) -> list[int]:
        """Forgets the least recently used of the cached blocks."""
        blocks: list[int] = []
        while len(blocks) < num_blocks:
            if self._recycled:  # what hung on one that was forgotten
                blocks.append(self._recycled.pop())
                continue
            piece = self._cached.oldest()
            run, stop = piece.run, piece.stop
            is_last = stop == len(run.blocks)  # seldom not: a run's last blocks are the least recently used ones
            start = max(piece.start, stop - num_blocks + len(blocks)) if is_last else stop - 1
            blocks += reversed(run.blocks[start:stop])
            self._cached.shorten(piece, start)
            self._forget(run, start)
        return blocks

    def _forget(self, run: BlockRun, start: int) -> None:
        """Makes a run's blocks from place `start` on unfindable; those that were cached are empty then."""
        lost = run.blocks[start:]
        del run.blocks[start:]
        if not start:
            del self._index[run.hashed]
            run.data = b""  # the blocks may refer to the run for long
        for place in self._cached.take_from(run, start) if run.unused else ():
            self._recycled.append(lost[place - start])

    def free(self, block_ids: Ids[int]) -> None:
        """Gives back one reference to each block; findable ones stay so until they are reallocated.

        The last blocks become the least recently used ones, because a prefix is of no use without its beginning.
        Raises ValueError for a block that is not referenced.
        """
        stop = len(block_ids)
        while stop:
            block = block_ids[stop - 1]
            run = self._run_of(block)
            if run is None:
                self._free_unfindable(block)
                stop -= 1
                continue
            last = self._places[block] + 1
            count = run.num_together(last, block_ids, stop)
            self._free_of_run(run, last - count, last)
            stop -= count

    def _free_of_run(self, run: BlockRun, start: int, stop: int) -> None:
        """Gives back one reference to each of the run's blocks from place `start` to `stop`."""
        blocks, ref_counts = run.blocks[start:stop], self._ref_counts
        left = [ref_counts[block] - 1 for block in blocks]
        if min(left) < 0:
            raise ValueError(f"KV block {blocks[left.index(min(left))]} freed more often than it was taken")
        for block, count in zip(blocks, left, strict=True):
            ref_counts[block] = count
        self._cached.add(run, start, left)

    def _free_unfindable(self, block: int) -> None:
        left = self._ref_counts[block] - 1
        if left < 0:
            raise ValueError(f"KV block {block} freed more often than it was taken")
        self._ref_counts[block] = left
        self._recycled += () if left else (block,)

    def match_prefix(self, token_ids: npt.NDArray[np.int32], domain: str = "") -> list[int]:
        """The blocks that hold the longest known beginning of `token_ids` (int32, as in `register`: their bytes are
        compared), whole blocks only. Takes a reference to each."""
        if not self.enable_prefix_caching:
            return []
        data, found = self._bytes_of_full_blocks(token_ids), list[int]()
        link: Link = domain
        while (run := self._find(link, data, len(found))) is not None:
            count = run.num_common(0, data, len(found))
            found += run.blocks[:count]
            if run.unused:
                self._cached.use(run, count)
            link = run.number + count - 1
        ref_counts = self._ref_counts
        for block in found:
            ref_counts[block] += 1
        return found

    def register(
        self,
        block_ids: Ids[int],
        token_ids: npt.NDArray[np.int32],
        num_tokens: int,
        domain: str = "",
        parent: int | None = None,
    ) -> None:
        """Makes the full blocks among the first `num_tokens` tokens findable; block_ids[i] holds tokens
        [i * block_size, (i + 1) * block_size) of `token_ids`.

        parent: the sequence's block before block_ids[0], registered before; None at the sequence's start (only there
        `domain` counts). Nothing is registered after a parent that was dropped.
        """
        if not self.enable_prefix_caching:
            return
        data, start = self._bytes_of_full_blocks(token_ids[:num_tokens]), 0
        blocks, link = list(block_ids[: len(data) // self._block_bytes]), domain if parent is None else _NOTHING
        if parent is not None and (home := self._home(parent)) is not None:
            place = self._places[parent] + 1
            start = self._double(home, place, data, 0, blocks)
            link = home.number + place + start - 1
        while start < len(blocks) and link != _NOTHING:
            key = (link, self._piece(data, start))
            hashed = self._hash(key)
            run = self._index.get(hashed)
            if run is None:
                return self._add_run(key, hashed, blocks[start:], data[start * self._block_bytes :])
            if run.key != key:
                return  # the hashes collide
            count = self._double(run, 0, data, start, blocks)
            start += count
            link = run.number + count - 1

    def _run_of(self, block: int) -> BlockRun | None:
        """Of a findable block."""
        run, place = self._runs[block], self._places[block]
        return run if run is not None and place < len(run.blocks) and run.blocks[place] == block else None

    def _home(self, block: int) -> BlockRun | None:
        """The run that holds the content of a block; None where it is not known or not findable."""
        run = self._run_of(block) or self._doubles.get(block)
        return run if run is not None and self._places[block] < len(run.blocks) else None

    def _double(self, run: BlockRun, place: int, data: bytes, start: int, blocks: list[int]) -> int:
        """Lets blocks from `start` on lead on to those of a run from `place` on, as far as their contents are equal.
        Returns how many are."""
        count = run.num_common(place, data, start)
        for at, block in enumerate(blocks[start : start + count], place):
            self._places[block] = at
            if self._run_of(block) is None:
                self._doubles[block] = run
        return count

    def _add_run(self, key: BlockKey, hashed: int, blocks: list[int], data: bytes) -> None:
        run = self._index[hashed] = BlockRun(key, hashed, self._last_number + 1, blocks, data, self._block_bytes)
        self._last_number += len(blocks)
        runs, places = self._runs, self._places
        for place, block in enumerate(blocks):
            runs[block] = run
            places[block] = place
        for block in blocks if self._doubles else ():
            self._doubles.pop(block, None)

    def drop(self, block_ids: Ids[int]) -> None:
        """Forgets what the blocks hold, and with them all that hangs on them; references stay as they are."""
        for block in block_ids:
            run = self._run_of(block)
            if run is not None:
                self._forget(run, self._places[block])
            self._doubles.pop(block, None)

    def _find(self, link: Link, data: bytes, start: int) -> BlockRun | None:
        """The run that holds, after `link`, the content of block `start` of data."""
        if (start + 1) * self._block_bytes > len(data):
            return None
        key = (link, self._piece(data, start))
        run = self._index.get(self._hash(key))
        return run if run is not None and run.key == key else None

    def _piece(self, data: bytes, place: int) -> bytes:
        return data[place * self._block_bytes : (place + 1) * self._block_bytes]

    def _bytes_of_full_blocks(self, token_ids: npt.NDArray[np.int32]) -> bytes:
        return token_ids[: len(token_ids) // self.block_size * self.block_size].tobytes()

    def check_integrity(self) -> None:
        """Raises RuntimeError unless each block is in exactly one state (empty + cached + used == num_blocks) and the
        index agrees with the blocks' contents."""
        if min(self._ref_counts) < 0:
            raise RuntimeError(f"KV block {self._ref_counts.index(min(self._ref_counts))} has references below 0")
        states = {
            "empty": [*range(self._next_fresh, self.num_blocks), *self._recycled],
            "cached": list(self._cached),
            "used": [b for b, count in enumerate(self._ref_counts) if count > 0],
        }
        if sorted(b for blocks in states.values() for b in blocks) != list(range(self.num_blocks)):
            sizes = ", ".join(f"{len(blocks)} {state}" for state, blocks in states.items())
            raise RuntimeError(f"KV block pool of {self.num_blocks} blocks is inconsistent: {sizes}")
        homes = {block: self._run_of(block) for block in range(self.num_blocks)}
        findable = {block: (run.hashed, self._places[block]) for block, run in homes.items() if run is not None}
        indexed = {
            block: (hashed, place) for hashed, run in self._index.items() for place, block in enumerate(run.blocks)
        }
        if indexed != findable:
            raise RuntimeError("the prefix index disagrees with the blocks' contents")
        if any(b in findable for b in states["empty"]) or any(b not in findable for b in states["cached"]):
            raise RuntimeError("an empty KV block is findable, or a cached one is not")
