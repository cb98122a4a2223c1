"""Who holds which KV block, and which blocks can be shared because their contents are known. Moves integers only; the
scheduler is its one caller, paged_kv owns the bytes."""

from collections.abc import Callable, Iterable

import numpy as np

from batchinfer.cache.block_run import BlockIds, BlockKey, BlockRun
from batchinfer.cache.prefix_index import PrefixIndex, TokenIds
from batchinfer.cache.unused_blocks import EmptyBlocks, UnusedBlocks


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
        self._ref_counts = np.zeros(num_blocks, np.int32)
        self._empty = EmptyBlocks(num_blocks)
        self._cached = UnusedBlocks()
        self._index = PrefixIndex(num_blocks, block_size, hash_function)

    @property
    def num_free_blocks(self) -> int:
        """Blocks that `allocate` can give: empty and cached."""
        return len(self._empty) + len(self._cached)

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
        return int(self._ref_counts[block_id])

    def held_by_few(self, block_ids: BlockIds) -> tuple[BlockIds, BlockIds]:
        """Those of the blocks that have one reference, and those that have two."""
        ref_counts = self._ref_counts[block_ids]
        if not len(block_ids) or not np.count_nonzero(ref_counts <= 2):  # none shared, or a beginning by many
            return block_ids[:0], block_ids[:0]
        return block_ids[ref_counts == 1], block_ids[ref_counts == 2]

    def allocate(self, num_blocks: int) -> BlockIds:
        """Takes blocks of undefined content, one reference each. Raises OutOfBlocks, taking none."""
        if num_blocks > self.num_free_blocks:
            raise OutOfBlocks(f"{num_blocks} KV blocks asked for, {self.num_free_blocks} of {self.num_blocks} are free")
        blocks = self._empty.take(num_blocks)
        if len(blocks) < num_blocks:
            blocks = np.concatenate([blocks, *self._evict(num_blocks - len(blocks))])
        self._ref_counts[blocks] = 1
        self._index.forget_doubles(blocks)
        return blocks

    def _evict(self, num_blocks: int) -> list[BlockIds]:
        """Forgets the least recently used of the cached blocks."""
        parts: list[BlockIds] = []
        while num_blocks:
            if self._empty:  # what hung on one that was forgotten
                parts.append(self._empty.take(num_blocks))
            else:
                piece = self._cached.oldest()
                run, stop = piece.run, piece.stop
                is_last = stop == len(run.blocks)  # seldom not: a run's last blocks are the least recently used ones
                start = max(piece.start, stop - num_blocks) if is_last else stop - 1
                parts.append(run.blocks[start:stop][::-1])
                self._cached.shorten(piece, start)
                self._forget(run, start)
            num_blocks -= len(parts[-1])
        return parts

    def _forget(self, run: BlockRun, start: int) -> None:
        """Makes a run's blocks from place `start` on unfindable; those that were cached are empty then."""
        lost = self._index.forget(run, start)
        for place in self._cached.take_from(run, start) if run.unused else ():
            self._empty.give_back(int(lost[place - start]))

    def free(self, block_ids: BlockIds) -> None:
        """Gives back one reference to each block, no two equal; findable ones stay so until they are reallocated.

        The last blocks become the least recently used ones, because a prefix is of no use without its beginning.
        Raises ValueError for a block that is not referenced.
        """
        left = self._ref_counts[block_ids] - 1
        are_unused = not np.count_nonzero(left)
        if not are_unused and left.min() < 0:
            raise ValueError(f"KV block {block_ids[left.argmin()]} freed more often than it was taken")
        self._ref_counts[block_ids] = left
        stop = len(block_ids)
        while stop:
            block = int(block_ids[stop - 1])
            run = self._index.run_of(block)
            if run is None:
                stop -= 1
                if not left[stop]:
                    self._empty.give_back(block)
                continue
            last = self._index.place_of(block) + 1
            count = run.num_together(last, block_ids, stop)
            stop -= count
            if are_unused:
                self._cached.add_piece(run, last - count, last)
            else:
                self._cached.add(run, last - count, left[stop : stop + count].tolist())

    def match_prefix(self, token_ids: TokenIds, domain: str = "") -> BlockIds:
        """The blocks that hold the longest known beginning of `token_ids` (int32, as in `register`: their bytes are
        compared), whole blocks only. Takes a reference to each."""
        found = self._index.match(token_ids, domain) if self.enable_prefix_caching else []
        if not found:
            return np.zeros(0, np.int64)
        for run, count in found:
            if run.unused:
                self._cached.use(run, count)
        blocks = np.concatenate([run.blocks[:count] for run, count in found])
        self._ref_counts[blocks] += 1
        return blocks

    def register(self, block_ids: BlockIds, token_ids: TokenIds, domain: str = "", parent: int | None = None) -> None:
        """Makes the blocks that `token_ids` fill findable; block_ids[i] holds tokens [i * block_size, (i + 1) *
        block_size) of them.

        parent: the sequence's block before block_ids[0], registered before; None at the sequence's start (only there
        `domain` counts). Nothing is registered after a parent that was dropped.
        """
        if self.enable_prefix_caching:
            self._index.register(block_ids, token_ids, domain, parent)

    def drop(self, block_ids: Iterable[int]) -> None:
        """Forgets what the blocks hold, and with them all that hangs on them; references stay as they are."""
        blocks = list(block_ids)
        for block in blocks:
            run = self._index.run_of(block)
            if run is not None:
                self._forget(run, self._index.place_of(block))
        self._index.forget_doubles(np.array(blocks, np.int64))

    def check_integrity(self) -> None:
        """Raises RuntimeError unless each block is in exactly one state (empty + cached + used == num_blocks) and the
        index agrees with the blocks' contents."""
        if self._ref_counts.min() < 0:
            raise RuntimeError(f"KV block {self._ref_counts.argmin()} has references below 0")
        states = {
            "empty": list(self._empty),
            "cached": list(self._cached),
            "used": np.flatnonzero(self._ref_counts).tolist(),
        }
        if sorted(b for blocks in states.values() for b in blocks) != list(range(self.num_blocks)):
            sizes = ", ".join(f"{len(blocks)} {state}" for state, blocks in states.items())
            raise RuntimeError(f"KV block pool of {self.num_blocks} blocks is inconsistent: {sizes}")
        findable = self._index.findable_blocks()
        if not findable.isdisjoint(states["empty"]) or not findable.issuperset(states["cached"]):
            raise RuntimeError("an empty KV block is findable, or a cached one is not")
