"""Sequences that attend to their first keys together, under Triton's interpreter as triton_interpreted.py is: against
the reference, and bit for bit against the same sequences without it."""

import math

import numpy as np
import pytest
import torch
from batchinfer.kernels.paged_attention import gpu, reference
from batchinfer.kernels.paged_attention.segments import SEGMENT_KEYS, SEGMENTS, segment_keys, stack_size
from batchinfer.kernels.paged_attention.variant import Variant

BLOCK_SIZE = 32
PER_SEGMENT = SEGMENT_KEYS // BLOCK_SIZE


@pytest.fixture(autouse=True)
def _poisoned_outputs(monkeypatch):
    """What a program leaves out shows as NaN."""
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *shape, **options: empty(*shape, **options).fill_(math.nan))


class Batch:
    """Sequences of which each but the first of a stack begins with the blocks of the one before.

    lens: of each; stacks: lists of sequences, with the segments that they share.
    """

    def __init__(self, lens, stacks, heads, head_dim, dtype, q_lens=None):
        generator = torch.Generator().manual_seed(len(lens))
        self.lens, self.q_lens = lens, q_lens or [1] * len(lens)
        group = heads[0] // heads[1]
        counts = [-(-n // BLOCK_SIZE) for n in lens]
        ids = torch.randperm(sum(counts) + 3, generator=generator).int()
        self.tables = list(ids[3:].split(counts))
        self.unread = int(ids[0])
        self.stacks = torch.full((len(lens), 1 + stack_size(group)), -1).int()
        self.stacks[:, 0], self.stacks[:, 1] = 0, torch.arange(len(lens))
        for members, segments in stacks:
            for member in members:
                self.tables[member][: segments * PER_SEGMENT] = self.tables[members[0]][: segments * PER_SEGMENT]
                self.stacks[member, : 1 + len(members)] = torch.tensor([segments, *members])
        shape = (len(ids), heads[1], BLOCK_SIZE, head_dim)
        self.caches = [torch.randn(shape, generator=generator).to(dtype) for _ in range(2)]
        self.q = torch.randn(sum(self.q_lens), heads[0], head_dim, generator=generator).to(dtype)

    def run(self, backend, *extra, tables=None, **options):
        scales = options.pop("scales", (None, None))
        table = torch.nn.utils.rnn.pad_sequence(tables or self.tables, batch_first=True)
        offsets = torch.tensor([0, *self.q_lens]).cumsum(0).int()
        variant = Variant(self.q.shape[-1] ** -0.5, **options)
        lens = torch.tensor(self.lens).int()
        return backend.paged_attention(self.q, *self.caches, table, offsets, lens, *scales, variant, *extra)

    def check(self, **options):
        expected, alone = self.run(reference, **options), self.run(gpu, **options)
        together = self.run(gpu, self.stacks, **options)
        tolerance = 1e-5 if self.q.dtype == torch.float32 else 4e-3
        torch.testing.assert_close(together, expected, rtol=tolerance, atol=tolerance)
        assert torch.equal(together, alone)
        return together

    def quantise(self, dtype, has_offset=False):
        codes = [(cache.clamp(-3, 3) * 30).to(dtype) for cache in self.caches]
        scales = tuple(torch.rand(cache.shape[:-1]) * 0.05 + 1e-3 for cache in self.caches)
        offset = torch.randn(-(-max(self.lens) // 256) + 1, *self.caches[0].shape[1::2]) if has_offset else None
        self.caches = codes
        return {"scales": scales, "k_offset": offset}


TWO = ([0, 2], 1)


@pytest.mark.parametrize(
    ("heads", "lens", "stacks"),
    [
        ((3, 1), [600, 513, 530], [TWO]),  # and one that is alone
        pytest.param((4, 1), [1030, 1026, 20, 1025], [([1, 3, 0], 2)], marks=pytest.mark.slow),
        pytest.param((4, 2), [513] * 8, [([*range(8)], 1)], marks=pytest.mark.slow),  # a whole tile of 16 rows
        ((7, 1), [1030, 1025, 520, 514], [([0, 1], 2), ([3, 2], 1)]),
        ((2, 2), [530, 540], [([1, 0], 1)]),
    ],
)
def test_stacks_change_no_bit(heads, lens, stacks):
    Batch(lens, stacks, heads, 32, torch.float32).check()


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8])
@pytest.mark.parametrize("has_offset", [False, True])
def test_caches_of_8_bits(dtype, has_offset):
    batch = Batch([600, 530, 540, 520], [([3, 0, 2, 1], 1)], (4, 1), 32, torch.float16)
    batch.check(**batch.quantise(dtype, has_offset))


def test_static_scales_sinks_and_caps():
    batch = Batch([600, 530, 700], [([1, 2], 1)], (4, 2), 32, torch.float16)
    batch.quantise(torch.float8_e4m3fn)
    static = torch.tensor([0.02, 0.05])
    batch.check(scales=(static, static), sinks=torch.tensor([0.3, -1.0, 2.0, 5.0]), soft_cap=2.0)


def test_chunks_of_prompts_stand_beside_stacks():
    batch = Batch([600, 40, 513], [TWO], (4, 2), 32, torch.float32, q_lens=[1, 20, 1])
    batch.check()


def test_what_is_shared_is_read_once():
    """Through the first one's table: the others' lead to numbers that would show."""
    batch = Batch([1030, 520, 1040], [([2, 0], 2)], (2, 1), 32, torch.float32)
    for cache in batch.caches:
        cache[batch.unread] = math.nan
    tables = [table.clone() for table in batch.tables]
    tables[0][: 2 * PER_SEGMENT] = batch.unread
    expected = batch.check()
    assert torch.equal(batch.run(gpu, batch.stacks, tables=tables), expected)
    assert batch.run(gpu, tables=tables)[0].isnan().all()


def test_a_window_leaves_stacks_aside():
    batch = Batch([600, 530], [([1, 0], 1)], (4, 2), 32, torch.float32)
    batch.check(sliding_window=100)


@pytest.mark.slow
def test_long_contexts_have_longer_segments():
    """Above 16,384 keys a segment has 1,024 of them, and two of 512 keys are one."""
    batch = Batch([16_500, 16_385], [([0, 1], 2)], (2, 1), 16, torch.float32)
    batch.stacks[:, 0] = 1
    batch.check()


def test_lengths_give_the_segments():
    """As many of them as there are programs for, and as few as fill a device: 17 from 16,385 keys on."""
    lengths = np.array([1, 512, 16_384, 16_385, 32_768, 32_769, 131_072])
    sizes = segment_keys(lengths)
    assert sizes.tolist() == [512, 512, 512, 1024, 1024, 1536, 4096]
    counts = -(-lengths // sizes)
    assert counts.max() == SEGMENTS
    assert counts[3:].min() == 17


def test_rows_that_fill_a_graph_up_are_in_no_stack():
    batch = Batch([600, 0, 530], [TWO], (4, 2), 32, torch.float32)
    expected = Batch([600, 1, 530], [TWO], (4, 2), 32, torch.float32)
    batch.tables, batch.caches, batch.q = expected.tables, expected.caches, expected.q
    assert torch.equal(batch.run(gpu, batch.stacks)[::2], expected.run(gpu)[::2])
