import random
import subprocess
import sys

import numpy as np
import numpy.typing as npt
import pytest

from batchinfer.cache import block_pool
from batchinfer.cache.block_pool import OutOfBlocks, key_domain
from batchinfer.cache.block_run import BlockKey


class BlockPool(block_pool.BlockPool):
    """Takes and gives lists, which compare whole and do not change with the pool."""

    def allocate(self, num_blocks: int) -> list[int]:  # type: ignore[override]
        return super().allocate(num_blocks).tolist()

    def free(self, block_ids: list[int]) -> None:  # type: ignore[override]
        super().free(np.array(block_ids, np.int64))

    def match_prefix(self, token_ids: npt.NDArray[np.int32], domain: str = "") -> list[int]:  # type: ignore[override]
        return super().match_prefix(token_ids, domain).tolist()

    def register(  # type: ignore[override]
        self,
        block_ids: list[int],
        token_ids: npt.NDArray[np.int32],
        num_tokens: int,
        domain: str = "",
        parent: int | None = None,
    ) -> None:
        super().register(np.array(block_ids, np.int64), token_ids[:num_tokens], domain, parent)


def ids(*tokens: int) -> npt.NDArray[np.int32]:
    return np.array(tokens, np.int32)


def constant_hash(key: BlockKey) -> int:
    return 0


def fill(pool: BlockPool, tokens: npt.NDArray[np.int32], domain: str = "") -> list[int]:
    """Allocates blocks for the tokens and registers the full ones."""
    blocks = pool.allocate(pool.num_blocks_for(len(tokens)))
    pool.register(blocks, tokens, len(tokens), domain)
    return blocks


def test_blocks_never_used_come_in_ascending_order_and_freed_ones_before_them() -> None:
    pool = BlockPool(10, 4)
    assert pool.allocate(3) == [0, 1, 2]
    pool.free([0, 1])
    assert sorted(pool.allocate(3)) == [0, 1, 3]
    assert (pool.num_free_blocks, pool.num_used_blocks) == (6, 4)


def test_allocation_takes_all_or_nothing() -> None:
    pool = BlockPool(3, 4)
    pool.allocate(1)
    with pytest.raises(OutOfBlocks, match="3 KV blocks asked for, 2 of 3 are free"):
        pool.allocate(3)
    assert pool.num_free_blocks == 2
    pool.check_integrity()


def test_a_block_is_not_freed_twice() -> None:
    pool = BlockPool(3, 4)
    blocks = pool.allocate(1)
    pool.free(blocks)
    with pytest.raises(ValueError, match="KV block 0 freed more often"):
        pool.free(blocks)
    assert pool.ref_count(0) == 0
    pool.check_integrity()


def test_a_findable_block_is_not_freed_twice() -> None:
    pool = BlockPool(3, 2)
    blocks = fill(pool, ids(1, 2, 3, 4))
    pool.free(blocks[1:])
    with pytest.raises(ValueError, match="KV block 1 freed more often"):
        pool.free(blocks)
    assert [pool.ref_count(block) for block in blocks] == [1, 0]
    pool.check_integrity()


def test_the_longest_known_beginning_is_found_in_whole_blocks() -> None:
    pool = BlockPool(10, 2)
    blocks = fill(pool, ids(1, 2, 3, 4, 5))
    assert pool.match_prefix(ids(1, 2, 3, 4, 5, 6)) == blocks[:2]  # the third block was not full
    assert pool.match_prefix(ids(1, 2, 3)) == blocks[:1]
    assert pool.match_prefix(ids(1, 2, 9, 4)) == blocks[:1]
    assert pool.match_prefix(ids(3, 4)) == []  # known, but not as a beginning
    assert pool.match_prefix(ids(1)) == []
    assert [pool.ref_count(b) for b in blocks] == [4, 2, 1]


def test_only_the_tokens_written_are_registered_and_more_can_follow() -> None:
    pool = BlockPool(10, 2)
    blocks = pool.allocate(3)
    tokens = ids(1, 2, 3, 4, 5, 6)
    pool.register(blocks, tokens, 3)
    assert pool.match_prefix(tokens) == blocks[:1]
    pool.register(blocks[1:], tokens[2:], 4, parent=blocks[0])
    assert pool.match_prefix(tokens) == blocks


def test_a_sequence_that_grows_stays_one_run_until_another_hangs_on_its_end() -> None:
    pool = BlockPool(10, 2)
    tokens = ids(1, 2, 3, 4, 5, 6, 7, 8)
    blocks, more, other = fill(pool, tokens[:4]), pool.allocate(2), pool.allocate(3)
    pool.register(more[:1], tokens[4:6], 2, parent=blocks[1])
    assert len(pool._index._index) == 1
    pool.register([*blocks, *more[:1], other[0]], ids(1, 2, 3, 4, 5, 6, 9, 9), 8)  # from the start, as another would
    pool.register(more[1:], tokens[6:], 2, parent=more[0])
    pool.register(other[1:2], ids(9, 9), 2, parent=more[0])  # a double
    assert len(pool._index._index) == 3
    assert pool.match_prefix(tokens) == blocks + more
    assert pool.match_prefix(ids(1, 2, 3, 4, 5, 6, 9, 9)) == [*blocks, more[0], other[0]]
    pool.check_integrity()


def test_a_run_that_lost_its_end_does_not_grow_again() -> None:
    """Else what hung on the lost block would be found after the new one."""
    pool = BlockPool(10, 2)
    blocks, follower, new = fill(pool, ids(1, 2, 3, 4, 5, 6)), pool.allocate(1), pool.allocate(1)
    pool.register(follower, ids(7, 8), 2, parent=blocks[1])
    assert pool.match_prefix(ids(1, 2, 3, 4, 7, 8)) == [*blocks[:2], *follower]
    pool.drop([blocks[1]])
    pool.register(new, ids(9, 9), 2, parent=blocks[0])
    assert pool.match_prefix(ids(1, 2, 9, 9, 7, 8)) == [blocks[0], *new]
    pool.check_integrity()


def test_freed_blocks_stay_findable_and_the_least_recently_used_goes_first() -> None:
    pool = BlockPool(4, 2)
    old, new = fill(pool, ids(1, 2, 3, 4)), fill(pool, ids(5, 6, 7, 8))
    pool.free(old)
    pool.free(new)
    assert (pool.num_cached_blocks, pool.num_free_blocks) == (4, 4)
    pool.free(pool.match_prefix(ids(1, 2, 3, 4)))  # now the other is the older one
    assert pool.allocate(1) == [new[1]]  # its end before its beginning
    assert pool.match_prefix(ids(5, 6, 7, 8)) == new[:1]
    assert pool.allocate(1) == [old[1]]
    assert pool.match_prefix(ids(1, 2, 3, 4)) == old[:1]
    pool.check_integrity()


def test_collisions_of_hashes_find_nothing_wrong() -> None:
    """Case 44: with each hash equal, only what holds just these tokens after just this beginning is found."""
    pool = BlockPool(10, 2, hash_function=constant_hash)
    blocks = fill(pool, ids(1, 2, 3, 4))
    assert pool.match_prefix(ids(1, 2)) == blocks[:1]
    for other in (ids(3, 4), ids(2, 1), ids(9, 9)):
        fill(pool, other)
        assert pool.match_prefix(other) == []
    fill(pool, ids(1, 2, 7, 8))
    assert pool.match_prefix(ids(1, 2, 7, 8)) == blocks[:1]
    assert pool.match_prefix(ids(1, 2, 3, 4)) == blocks
    pool.check_integrity()


def test_equal_blocks_after_different_beginnings_are_different() -> None:
    pool = BlockPool(10, 2)
    first, second = fill(pool, ids(1, 2, 7, 8)), fill(pool, ids(3, 4, 7, 8))
    assert pool.match_prefix(ids(1, 2, 7, 8)) == first
    assert pool.match_prefix(ids(3, 4, 7, 8)) == second


@pytest.mark.parametrize("hash_function", [hash, constant_hash])
def test_domains_are_apart(hash_function: object) -> None:
    """Case 44: an adapter that bears a salt's name is another domain."""
    adapter, salt = key_domain(adapter="x"), key_domain(salt="x")
    assert len({adapter, salt, key_domain(adapter="x", salt="x"), key_domain(), ""}) == 5
    assert key_domain(adapter="a', 'salt': 'b") != key_domain(adapter="a", salt="b")
    pool = BlockPool(10, 2, hash_function=hash_function)  # type: ignore[arg-type]
    blocks = fill(pool, ids(1, 2), adapter)
    assert pool.match_prefix(ids(1, 2), salt) == []
    assert pool.match_prefix(ids(1, 2)) == []
    assert pool.match_prefix(ids(1, 2), adapter) == blocks


def test_equal_contents_computed_twice_lead_on_to_the_findable_one() -> None:
    pool = BlockPool(10, 2)
    tokens = ids(1, 2, 3, 4)
    first, second = pool.allocate(2), pool.allocate(2)
    pool.register(first, tokens, 2)
    pool.register(second, tokens, 2)  # its first block is a double
    pool.register(second[1:], tokens[2:], 2, parent=second[0])
    assert pool.match_prefix(tokens) == [first[0], second[1]]
    pool.free(second)
    assert pool.num_cached_blocks == 0  # second[1] is held by the match, the double is empty
    pool.check_integrity()


def test_what_hangs_on_a_reused_block_is_not_found() -> None:
    pool = BlockPool(3, 2)
    tokens = ids(1, 2, 3, 4)
    blocks = fill(pool, tokens)
    pool.free([blocks[0]])
    assert pool.allocate(2) == [2, blocks[0]]
    pool.register([blocks[0]], ids(1, 2), 2)  # the same tokens again, by chance in the same block
    assert pool.match_prefix(tokens) == [blocks[0]]


@pytest.mark.parametrize("is_free", [True, False])
def test_dropped_contents_are_not_found_nor_what_hangs_on_them(is_free: bool) -> None:
    """Case 43."""
    pool = BlockPool(8, 2)
    tokens = ids(1, 2, 3, 4, 5, 6, 7, 8)
    blocks = fill(pool, tokens[:6])
    if is_free:
        pool.free(blocks)
    pool.drop([blocks[1]])
    pool.check_integrity()
    assert pool.match_prefix(tokens) == blocks[:1]
    if not is_free:
        pool.register(pool.allocate(1), tokens[4:6], 2, parent=blocks[1])  # nothing follows a dropped block
        assert pool.match_prefix(tokens) == blocks[:1]
        pool.free(blocks)
    again = fill(pool, tokens)
    assert pool.match_prefix(tokens) == [blocks[0], *again[1:]]  # the first was never dropped
    pool.check_integrity()


def test_without_prefix_caching_nothing_is_found() -> None:
    pool = BlockPool(4, 2, enable_prefix_caching=False)
    blocks = fill(pool, ids(1, 2))
    assert pool.match_prefix(ids(1, 2)) == []
    pool.free(blocks)
    assert pool.num_cached_blocks == 0


def test_integrity_check_sees_lost_and_doubled_blocks() -> None:
    lost = BlockPool(4, 2)
    lost.free(lost.allocate(2))
    lost._empty.take(1)
    doubled = BlockPool(4, 2)
    doubled._empty.give_back(doubled.allocate(1)[0])
    stale = BlockPool(4, 2)
    stale._index._runs[fill(stale, ids(1, 2))[0]] = None
    negative = BlockPool(4, 2)
    negative._ref_counts[2] = -1
    messages = ("1 empty|3 empty", "1 used", "index disagrees", "KV block 2 has references below 0")
    for pool, message in zip((lost, doubled, stale, negative), messages, strict=True):
        with pytest.raises(RuntimeError, match=message):
            pool.check_integrity()


@pytest.mark.parametrize(("num_blocks", "block_size"), [(0, 4), (4, 0)])
def test_sizes_are_checked(num_blocks: int, block_size: int) -> None:
    with pytest.raises(ValueError, match="must be 1 or more"):
        BlockPool(num_blocks, block_size)


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("hash_function", [hash, lambda key: hash(key) % 3])
def test_random_use_against_plain_records(seed: int, hash_function: object) -> None:
    """Holders take, register, match, free and drop at random; a plain record of each block's whole prefix says what
    a match may return."""
    rng = random.Random(seed)
    pool = BlockPool(12, 2, hash_function=hash_function)  # type: ignore[arg-type]
    contents: dict[int, tuple[int, ...]] = {}  # block -> all tokens up to its end
    held: list[list[int]] = []
    num_hits = 0
    for _ in range(600):
        tokens = tuple(rng.randrange(2) for _ in range(rng.randrange(1, 9)))
        found = pool.match_prefix(np.array(tokens, np.int32))
        for i, block in enumerate(found):
            assert contents[block] == tokens[: 2 * i + 2]
        num_hits += len(found)
        num_new = pool.num_blocks_for(len(tokens)) - len(found)
        if num_new > pool.num_free_blocks:
            pool.free(found)
            if held:
                pool.free(held.pop(rng.randrange(len(held))))
        else:
            new = pool.allocate(num_new)
            assert not set(new) & {b for blocks in held for b in blocks}
            start = 2 * len(found)
            for i, block in enumerate(new):
                contents[block] = tokens[: start + 2 * i + 2]
            rest = np.array(tokens[start:], np.int32)
            pool.register(new, rest, len(rest), parent=found[-1] if found else None)
            held.append(found + new)
        if held and rng.random() < 0.4:
            pool.free(held.pop(rng.randrange(len(held))))
        if held and rng.random() < 0.05:
            dropped = rng.choice(held)
            pool.drop(dropped)
            for block in dropped:
                contents[block] = (-1,)
        pool.check_integrity()
        references = [sum(blocks.count(b) for blocks in held) for b in range(12)]
        assert [pool.ref_count(b) for b in range(12)] == references
        assert pool.num_used_blocks == sum(count > 0 for count in references)
    assert num_hits > 20


class NaivePool:
    """What a pool must find, by whole prefixes: each findable one has one block, is forgotten with all that extends it,
    and of the unreferenced ones the least recently used block goes first."""

    def __init__(self) -> None:
        self.block_of: dict[tuple[int, ...], int] = {}
        self.references: dict[int, int] = {}
        self.cached: list[int] = []

    def match(self, tokens: tuple[int, ...]) -> list[int]:
        stops = range(2, len(tokens) + 1, 2)
        found: list[int] = []
        for stop in stops:
            if tokens[:stop] not in self.block_of:
                break
            found.append(self.block_of[tokens[:stop]])
        return found

    def take(self, blocks: list[int]) -> None:
        for block in blocks:
            self.references[block] = self.references.get(block, 0) + 1
            if block in self.cached:
                self.cached.remove(block)

    def allocated(self, blocks: list[int]) -> None:
        """Where blocks of the cached ones were taken, they must be the least recently used, and are forgotten."""
        taken = [block for block in blocks if block in self.cached]
        for block in taken:
            assert block == self.cached.pop(0)
            self.forget(next(prefix for prefix, holder in self.block_of.items() if holder == block))
        self.take(blocks)

    def forget(self, prefix: tuple[int, ...]) -> None:
        for other in [known for known in self.block_of if known[: len(prefix)] == prefix]:
            block = self.block_of.pop(other)
            if block in self.cached:
                self.cached.remove(block)

    def register(self, blocks: list[int], tokens: tuple[int, ...]) -> None:
        for place, block in enumerate(blocks[: len(tokens) // 2]):
            self.block_of.setdefault(tokens[: 2 * place + 2], block)

    def free(self, blocks: list[int]) -> None:
        for block in reversed(blocks):
            self.references[block] -= 1
            if self.references[block] == 0 and block in self.block_of.values():
                self.cached.append(block)


@pytest.mark.parametrize("seed", range(10))
def test_just_what_was_registered_and_not_evicted_is_found(seed: int) -> None:
    """Prompts that part anywhere, registered in one or two pieces, in a pool that holds a few of them."""
    rng = random.Random(seed)
    pool, naive = BlockPool(50, 2), NaivePool()
    held: list[list[int]] = []
    num_found = num_evicted = 0
    for _ in range(400):
        tokens = tuple(rng.randrange(3) if place % 5 == 4 else 5 for place in range(rng.randrange(1, 30)))
        found = pool.match_prefix(np.array(tokens, np.int32))
        assert found == naive.match(tokens)
        naive.take(found)
        num_found += len(found)
        num_new = pool.num_blocks_for(len(tokens)) - len(found)
        if num_new > pool.num_free_blocks:
            pool.free(found)
            naive.free(found)
        else:
            before = pool.num_cached_blocks
            blocks = found + pool.allocate(num_new)
            naive.allocated(blocks[len(found) :])
            num_evicted += before - pool.num_cached_blocks
            first = rng.randrange(len(blocks) + 1)
            pool.register(blocks, np.array(tokens, np.int32), 2 * first)
            rest = np.array(tokens[2 * first :], np.int32)
            pool.register(blocks[first:], rest, len(rest), parent=blocks[first - 1] if first else None)
            naive.register(blocks, tokens)
            held.append(blocks)
        while held and (rng.random() < 0.5 or len(held) > 3):
            blocks = held.pop(rng.randrange(len(held)))
            pool.free(blocks)
            naive.free(blocks)
        assert pool.num_cached_blocks == len(naive.cached)
        pool.check_integrity()
    assert num_found > 300
    assert num_evicted > 300


def test_blocks_that_hung_on_an_evicted_one_are_given_too() -> None:
    pool = BlockPool(2, 2)
    first, second = pool.allocate(2)
    pool.register([first, second], np.array([1, 2, 3, 4], np.int32), 4)
    pool.free([first])
    pool.free([second])
    assert sorted(pool.allocate(2)) == [0, 1]
    pool.check_integrity()


def test_scheduling_and_the_pool_import_no_torch() -> None:
    code = (
        "import sys, batchinfer.scheduling.scheduler, batchinfer.cache.block_pool, batchinfer.cache.spec, "
        "batchinfer.engine.persistent_batch; sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
