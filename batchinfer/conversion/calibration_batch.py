"""Calibration sequences as ragged batches that the decoder's attention takes. Made once a job, used at each layer."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from batchinfer.models.attention import StepRotation
from batchinfer.models.rope import RotaryEmbedding
from batchinfer.models.spec import DecoderSpec

BLOCK_SIZE = 16  # tokens, of the one-layer cache
TOKENS_AT_ONCE = 4096  # of several sequences: bounds the intermediate values of a layer


@dataclass(frozen=True, slots=True)
class CalibrationBatch:
    """A models.batch.Batch of whole sequences, and which rows of the calibration's hidden states it is."""

    rows: slice
    token_ids: Tensor
    positions: Tensor
    slot_mapping: Tensor
    block_table: Tensor
    cu_seqlens_q: Tensor
    seq_lens: Tensor
    rotation: StepRotation
    stacks: None = None  # sequences share nothing
    wanted: None = None  # the hidden states of all tokens are

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_blocks(self) -> int:
        return int(self.block_table.max()) + 1


def make_batches(
    sequences: Sequence[Tensor], spec: DecoderSpec, tokens_at_once: int = TOKENS_AT_ONCE
) -> list[CalibrationBatch]:
    """sequences: token ids, int64 [num_tokens] each. A batch holds whole sequences of at most `tokens_at_once` tokens
    together, or a single longer one."""
    rope = RotaryEmbedding(spec.rope, torch.device("cpu"))
    batches: list[CalibrationBatch] = []
    first_row = 0
    group: list[Tensor] = []
    for sequence in [*sequences, None]:
        full = sequence is None or sum(map(len, group)) + len(sequence) > tokens_at_once
        if group and full:
            batches.append(_batch(group, first_row, rope))
            first_row = batches[-1].rows.stop
            group = []
        if sequence is not None:
            group.append(sequence)
    return batches


def _batch(sequences: Sequence[Tensor], first_row: int, rope: RotaryEmbedding) -> CalibrationBatch:
    lengths = torch.tensor([len(sequence) for sequence in sequences])
    blocks = -(-lengths // BLOCK_SIZE)
    first_block = blocks.cumsum(0) - blocks
    table = first_block[:, None] + torch.arange(int(blocks.max()))
    positions = torch.cat([torch.arange(length) for length in lengths.tolist()])
    slots = (first_block * BLOCK_SIZE).repeat_interleave(lengths) + positions
    total = int(lengths.sum())
    cos_sin = rope.cos_sin(positions, lengths.repeat_interleave(lengths))
    return CalibrationBatch(
        rows=slice(first_row, first_row + total),
        token_ids=torch.cat(list(sequences)),
        positions=positions,
        slot_mapping=slots,
        block_table=torch.minimum(table, (first_block + blocks - 1)[:, None]).to(torch.int32),
        cu_seqlens_q=torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).to(torch.int32),
        seq_lens=lengths.to(torch.int32),
        rotation=StepRotation(cos_sin, torch.arange(total)),
    )
