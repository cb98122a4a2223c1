"""Who holds which KV block, and which blocks can be shared because their contents are known. Moves integers only; the
scheduler is its one caller, paged_kv owns the bytes."""

from collections import OrderedDict
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Ids

import numpy as np
import numpy.typing as npt

# Where a block's content hangs: on the block before it, as (block id, generation), or at a sequence's start, as
# ("domain", domain). The two can never be equal.
Link = tuple[int, int] | tuple[str, str]
# A block's whole content: what comes before it and its own int32 token ids.
BlockKey = tuple[Link, bytes]

TOKEN_BYTES = 4


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

    The index maps a hash of a block's content to the block; what is found is compared whole, token ids and preceding
    block included, so a collision only costs a hit. A block that is reused or dropped gets a new generation, which
    makes everything that hung on it unfindable.

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
        self._hash = hash_function
        self._ref_counts = [0] * num_blocks
        self._generations = [0] * num_blocks
        self._keys: list[BlockKey | None] = [None] * num_blocks  # of findable blocks
        # What the next block hangs on. Differs from the block itself where another block with equal content is the
        # findable one.
        self._links: list[Link | None] = [None] * num_blocks
        self._index: dict[int, int] = {}  # hash of key -> block id
        self._next_fresh = 0
        self._recycled: list[int] = []  # empty, used before
        self._cached: OrderedDict[int, None] = OrderedDict()  # least recently used first

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

    def allocate(self, num_blocks: int) -> list[int]:
        """Takes blocks of undefined content, one reference each. Raises OutOfBlocks, taking none."""
        if num_blocks > self.num_free_blocks:
            raise OutOfBlocks(f"{num_blocks} KV blocks asked for, {self.num_free_blocks} of {self.num_blocks} are free")
        blocks = self._recycled[: -num_blocks - 1 : -1]
        del self._recycled[len(self._recycled) - len(blocks) :]
        first = self._next_fresh
        self._next_fresh = min(first + num_blocks - len(blocks), self.num_blocks)
        blocks += range(first, self._next_fresh)
        while len(blocks) < num_blocks:
            block, _ = self._cached.popitem(last=False)
            self._forget(block)
            blocks.append(block)
        for block in blocks:
            self._links[block] = None
            self._ref_counts[block] = 1
        return blocks

    def free(self, block_ids: Ids[int]) -> None:
        """Gives back one reference to each block; findable ones stay so until they are reallocated.

        The last blocks become the least recently used ones, because a prefix is of no use without its beginning.
        Raises ValueError for a block that is not referenced.
        """
        for block in reversed(block_ids):
            count = self._ref_counts[block] - 1
            if count < 0:
                raise ValueError(f"KV block {block} freed more often than it was taken")
            self._ref_counts[block] = count
            if count == 0:
                if self._keys[block] is None:
                    self._recycled.append(block)
                else:
                    self._cached[block] = None

    def match_prefix(self, token_ids: npt.NDArray[np.int32], domain: str = "") -> list[int]:
        """The blocks that hold the longest known beginning of `token_ids`, whole blocks only. Takes a reference to
        each."""
        if not self.enable_prefix_caching:
            return []
        found: list[int] = []
        link: Link = ("domain", domain)
        for tokens in self._split(token_ids, len(token_ids)):
            block = self._find((link, tokens))
            if block is None:
                break
            self._reference(block)
            found.append(block)
            link = (block, self._generations[block])
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
        link: Link | None = ("domain", domain) if parent is None else self._links[parent]
        for block, tokens in zip(block_ids, self._split(token_ids, num_tokens), strict=False):
            if link is None:
                return
            link = self._register_block(block, (link, tokens))

    def _register_block(self, block: int, key: BlockKey) -> Link | None:
        """Returns what the next block hangs on; None where a colliding hash leaves this one unfindable."""
        hashed = self._hash(key)
        holder = self._index.setdefault(hashed, block)
        if holder == block:
            self._keys[block] = key
        elif self._keys[holder] != key:
            return None
        self._links[block] = link = (holder, self._generations[holder])
        return link

    def drop(self, block_ids: Ids[int]) -> None:
        """Forgets what the blocks hold, and with them all that hangs on them; references stay as they are."""
        for block in block_ids:
            self._links[block] = None
            if self._keys[block] is None:
                continue
            self._forget(block)
            if block in self._cached:
                del self._cached[block]
                self._recycled.append(block)

    def _forget(self, block: int) -> None:
        key = self._keys[block]
        assert key is not None
        del self._index[self._hash(key)]
        self._keys[block] = None
        self._generations[block] += 1

    def _find(self, key: BlockKey) -> int | None:
        block = self._index.get(self._hash(key))
        return block if block is not None and self._keys[block] == key else None

    def _reference(self, block: int) -> None:
        if self._ref_counts[block] == 0:
            del self._cached[block]
        self._ref_counts[block] += 1

    def _split(self, token_ids: npt.NDArray[np.int32], num_tokens: int) -> Iterator[bytes]:
        """The token ids of each full block."""
        size = self.block_size * TOKEN_BYTES
        data = np.ascontiguousarray(token_ids[:num_tokens], dtype=np.int32).tobytes()
        for at in range(0, len(data) - size + 1, size):
            yield data[at : at + size]

    def check_integrity(self) -> None:
        """Raises RuntimeError unless each block is in exactly one state (empty + cached + used == num_blocks) and the
        index agrees with the blocks' contents."""
        states = {
            "empty": [*range(self._next_fresh, self.num_blocks), *self._recycled],
            "cached": list(self._cached),
            "used": [b for b, count in enumerate(self._ref_counts) if count > 0],
        }
        if sorted(b for blocks in states.values() for b in blocks) != list(range(self.num_blocks)):
            sizes = ", ".join(f"{len(blocks)} {state}" for state, blocks in states.items())
            raise RuntimeError(f"KV block pool of {self.num_blocks} blocks is inconsistent: {sizes}")
        findable = {block: self._hash(key) for block, key in enumerate(self._keys) if key is not None}
        if {block: hashed for hashed, block in self._index.items()} != findable:
            raise RuntimeError("the prefix index disagrees with the blocks' contents")
        if any(b in findable for b in states["empty"]) or any(b not in findable for b in states["cached"]):
            raise RuntimeError("an empty KV block is findable, or a cached one is not")
