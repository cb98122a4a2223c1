"""Shared beginnings of prompts against a plain search through all earlier prompts."""

import random

import numpy as np
import pytest

from batchinfer.cache.block_pool import BlockPool
from batchinfer.planning.prefixes import PrefixTally

BLOCK = 4


def tally(prompts: list[list[int]]) -> PrefixTally:
    made = PrefixTally(BLOCK)
    for prompt in prompts:
        made.add(np.array(prompt, np.int32))
    return made


def naive(prompts: list[list[int]]) -> list[int]:
    """Whole blocks of a prompt without its last token that some earlier prompt begins with."""
    found = []
    for i, prompt in enumerate(prompts):
        blocks = (len(prompt) - 1) // BLOCK
        seen = {tuple(p[: n * BLOCK]) for p in prompts[:i] for n in range(1, len(p) // BLOCK + 1)}
        found.append(max((n * BLOCK for n in range(blocks + 1) if tuple(prompt[: n * BLOCK]) in seen), default=0))
    return found


def drawn(seed: int) -> list[list[int]]:
    """Prompts of few different tokens, most of which go on from the beginning of another."""
    rng = random.Random(seed)
    prompts: list[list[int]] = []
    for _ in range(40):
        base = rng.choice(prompts)[: rng.randrange(20)] if prompts and rng.random() < 0.7 else []
        prompts.append([*base, *(rng.randrange(3) for _ in range(rng.randrange(1, 12)))])
    return prompts


@pytest.mark.parametrize("seed", range(10))
def test_cached_tokens_are_those_of_a_plain_search(seed: int) -> None:
    prompts = drawn(seed)
    assert tally(prompts).sharing().cached.tolist() == naive(prompts)
    assert sum(naive(prompts)) > 0


@pytest.mark.parametrize("seed", range(10))
def test_another_order_changes_who_comes_first(seed: int) -> None:
    prompts = drawn(seed)
    order = np.random.default_rng(seed).permutation(len(prompts))
    expected = np.zeros(len(prompts), np.int64)
    expected[order] = naive([prompts[i] for i in order])
    assert tally(prompts).sharing(order).cached.tolist() == expected.tolist()


@pytest.mark.parametrize("seed", range(3))
def test_agrees_with_the_block_pool(seed: int) -> None:
    """One prompt after the other through a pool that never has to forget."""
    prompts = drawn(seed)
    pool = BlockPool(1000, BLOCK)
    served = []
    for prompt in prompts:
        tokens = np.array(prompt, np.int32)
        cached = pool.match_prefix(tokens[:-1])
        blocks = np.concatenate([cached, pool.allocate(pool.num_blocks_for(len(tokens)) - len(cached))])
        pool.register(blocks, tokens)
        served.append(len(cached) * BLOCK)
    assert tally(prompts).sharing().cached.tolist() == served


def test_long_prompts_and_none() -> None:
    assert tally([]).sharing().cached.tolist() == []
    long = list(range(5000))
    assert tally([[1], long, long, long[:2500]]).sharing().cached.tolist() == [0, 0, 4996, 2496]


@pytest.mark.parametrize("seed", range(5))
def test_shared_tokens_are_those_that_any_other_prompt_has(seed: int) -> None:
    prompts = drawn(seed)
    sharing = tally(prompts).sharing()
    for i, prompt in enumerate(prompts):
        others = [tuple(p) for j, p in enumerate(prompts) if j != i]
        depths = [
            n
            for n in range(len(prompt) // BLOCK + 1)
            if any(o[: n * BLOCK] == tuple(prompt[: n * BLOCK]) for o in others)
        ]
        assert sharing.shared[i] == max(depths) * BLOCK
    beginnings = {(int(g), tuple(p[:s])) for g, p, s in zip(sharing.groups, prompts, sharing.shared, strict=True)}
    assert len({g for g, _ in beginnings}) == len(beginnings)
