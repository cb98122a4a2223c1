"""How a GPU cuts the keys of a sequence with one new token into segments, how many sequences attend to a segment
together, and what memory that takes. Without Triton: read by gpu.py, by engine/ for what sequences share, and by
executors/ for budgets."""

import numpy as np
import numpy.typing as npt
from batchinfer.kernels.common.key_offset import SEGMENT

SEGMENTS = 32  # most that the keys of a row are cut into: 8 KV heads of one long context then fill a large device
SEGMENT_KEYS = 512  # of a segment but the last, or a multiple of it; each tile of keys divides it


def segment_keys(seq_lens: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
    """Keys of each segment of sequences of those lengths, where no window hides any: as gpu_tiles.segment_of."""
    return SEGMENT_KEYS * -(-seq_lens // (SEGMENTS * SEGMENT_KEYS))


def rows_of_tile(group: int) -> int:
    """Of a product of the queries of one token, which matrix instructions want at least 16 of. group: query heads of a
    KV head."""
    return max(16, _power_of_two(group))


def stack_size(group: int) -> int:
    """Sequences whose queries fit the rows that such a product has anyway: so taking them together costs nothing, and
    what two or more of them have in common is read once for all."""
    return rows_of_tile(group) // group


def room(num_positions: int) -> int:
    """Segments that there are memory and programs for, in a block table of so many positions."""
    return min(SEGMENTS, -(-num_positions // SEGMENT_KEYS))


def part_bytes(num_seqs: int, num_q_heads: int, head_dim: int, num_positions: int) -> int:
    """Of what each segment comes to before they are joined: weighted values, a sum and a maximum in float32."""
    dim_block = max(16, _power_of_two(head_dim))
    return 4 * num_seqs * num_q_heads * room(num_positions) * (dim_block + 2)


def bias_bytes(num_tokens: int, num_q_heads: int, num_positions: int) -> int:
    """Of the products of queries and key offsets, as gpu_bias.beside_keys allocates them."""
    segments = -(-num_positions // SEGMENT)
    return 4 * num_tokens * num_q_heads * segments if segments > 1 else 0


def _power_of_two(number: int) -> int:
    """The least that is no smaller."""
    return 1 << (number - 1).bit_length()
