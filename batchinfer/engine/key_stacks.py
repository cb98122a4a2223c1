"""Which sequences of a step attend to their first keys together on a GPU: those whose block tables begin alike. Called
by the input builder, where steps are launched on one. No torch.

Where it pays: a stack of k sequences with s whole segments in common reads those keys once, not k times, and saves
(k - 1) * s * segment_keys * kv_heads * 2 * (bytes of a vector) in each layer. It costs a sequence 4 * (1 + k) bytes a
layer, as the rows of the product are there anyway. So it pays from two sequences and one segment of 512 keys on, and is
off where the tile has no rows to spare (more than 8 query heads of a KV head), or segments are no whole blocks."""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from batchinfer.engine.persistent_batch import StepInputs
from batchinfer.kernels.paged_attention.segments import SEGMENT_KEYS, segment_keys, stack_size

Ints = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class _Kept:
    """What the last stacks followed from."""

    whole: Ints
    units: Ints
    table: Ints
    stacks: Ints

    def is_for(self, whole: Ints, units: Ints, table: Ints) -> bool:
        pairs = ((self.whole, whole), (self.units, units), (self.table, table))
        return all(np.array_equal(mine, other) for mine, other in pairs)


class KeyStacks:
    """size: sequences of a stack at most. Only prompts are shared: what a sequence writes itself nobody else reads, but
    where it was preempted, and then so little that it is left aside."""

    def __init__(self, size: int, block_size: int) -> None:
        self._size = size
        self._blocks = SEGMENT_KEYS // block_size  # of the shortest segment
        self._block_size = block_size
        self._kept: _Kept | None = None

    @classmethod
    def make(cls, num_q_heads: int, num_kv_heads: int, block_size: int) -> "KeyStacks | None":
        """None where it cannot pay."""
        size = stack_size(num_q_heads // num_kv_heads)
        return cls(size, block_size) if size > 1 and SEGMENT_KEYS % block_size == 0 else None

    @property
    def width(self) -> int:
        return 1 + self._size

    def alone(self, num_seqs: int) -> Ints:
        """Of sequences that share nothing: int32 [num_seqs, width]."""
        stacks = np.full((num_seqs, self.width), -1, np.int32)
        stacks[:, 0], stacks[:, 1] = 0, np.arange(num_seqs)
        return stacks

    def of(self, inputs: StepInputs, prompt_lens: npt.NDArray[np.int32]) -> Ints:
        """int32 [num_seqs, width], as paged_attention takes them. The same array as before where nothing changed."""
        keys = segment_keys(inputs.seq_lens)
        units = keys // SEGMENT_KEYS
        is_single = np.diff(inputs.cu_seqlens_q) == 1
        whole = np.where(is_single, np.minimum(inputs.seq_lens - 1, prompt_lens) // keys, 0) * units
        most = int(whole.max())
        if most == 0:
            return self.alone(len(whole))
        table = inputs.block_table[:, : most * self._blocks]
        kept = self._kept
        if kept is None or not kept.is_for(whole, units, table):
            stacks = self.alone(len(whole))
            self._fill(stacks, table, whole, units)
            self._kept = kept = _Kept(whole, units, table.copy(), stacks)
        return kept.stacks

    def _fill(self, stacks: Ints, table: Ints, whole: Ints, units: Ints) -> None:
        """whole: units of SEGMENT_KEYS that each may share; units: of these in each one's segments."""
        rows = _repeated(table[:, self._blocks - 1], whole)
        if not len(rows):
            return
        ends = table[rows][:, self._blocks - 1 :: self._blocks]
        ends = np.where(np.arange(ends.shape[1]) < whole[rows, None], ends, -1)
        rows = rows[np.lexsort((*ends.T[::-1], units[rows]))]
        common = _in_common(table[rows], whole[rows], units[rows], self._blocks)
        for first, end in _runs(common):
            for start, size, shared in _cut(common[first : end - 1].tolist(), self._size):
                members = rows[first + start : first + start + size]
                stacks[members, 0] = shared // units[members[0]]
                stacks[members, 1 : 1 + size] = members


def _repeated(first: Ints, whole: Ints) -> npt.NDArray[np.intp]:
    """Rows that may share something, and whose number in `first` another such row has, too."""
    rows = np.flatnonzero(whole > 0)
    _, places, counts = np.unique(first[rows], return_inverse=True, return_counts=True)
    return rows[counts[places] > 1]


def _in_common(table: Ints, whole: Ints, units: Ints, blocks: int) -> npt.NDArray[np.int64]:
    """[n - 1]: how many units, in whole segments, each row and the next have in common from the beginning."""
    is_equal = (table[1:] == table[:-1]).reshape(len(table) - 1, -1, blocks).all(-1)
    common = np.logical_and.accumulate(is_equal, axis=1).sum(1)
    common = np.minimum(common, np.minimum(whole[1:], whole[:-1])) // units[1:] * units[1:]
    return np.where(units[1:] == units[:-1], common, 0)


def _runs(common: npt.NDArray[np.int64]) -> list[tuple[int, int]]:
    """[first, end) of neighbours of which each has something in common with the next."""
    cuts = [0, *(np.flatnonzero(common == 0) + 1).tolist(), len(common) + 1]
    return [(first, end) for first, end in pairwise(cuts) if end - first > 1]


def _cut(common: list[int], most: int) -> list[tuple[int, int, int]]:
    """Cuts a run into stacks of up to `most` neighbours so that they save the most: (first, size, what they have in
    common) of each of two or more. common: of each member of the run and the next."""
    num = len(common) + 1
    if min(common) == max(common):
        found = [(first, min(most, num - first), common[0]) for first in range(0, num, most)]
        return [stack for stack in found if stack[1] > 1]
    saved, sizes, shared = [0] * (num + 1), [1] * (num + 1), [0] * (num + 1)  # of the best cuts of the first so many
    for end in range(1, num + 1):
        saved[end], least = saved[end - 1], common[end - 2]
        for size in range(2, min(most, end) + 1):
            least = min(least, common[end - size])
            if saved[end - size] + (size - 1) * least > saved[end]:
                saved[end], sizes[end], shared[end] = saved[end - size] + (size - 1) * least, size, least
    stacks, end = [], num
    while end > 0:
        if sizes[end] > 1:
            stacks.append((end - sizes[end], sizes[end], shared[end]))
        end -= sizes[end]
    return stacks
