"""Whole token sequences side by side through the model in one pass, without a scheduler: for comparing models and
caches. Called by the KV guard of executors/ and by evaluation/."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from batchinfer.engine.input_builder import build_forward_batch
from batchinfer.engine.model import Model
from batchinfer.engine.persistent_batch import StepInputs

TokenIds = npt.NDArray[np.int32]


def pack(sequences: Sequence[TokenIds], most_tokens: int) -> Iterator[list[TokenIds]]:
    """The sequences in their order, as many in a pass as make up at most `most_tokens`, a longer one alone."""
    pass_, num_tokens = list[TokenIds](), 0
    for sequence in sequences:
        if pass_ and num_tokens + len(sequence) > most_tokens:
            yield pass_
            pass_, num_tokens = [], 0
        pass_.append(sequence)
        num_tokens += len(sequence)
    if pass_:
        yield pass_


def blocks_needed(sequences: Sequence[TokenIds], block_size: int) -> int:
    """Blocks of the KV cache that a pass over the sequences fills."""
    return sum(-(-len(sequence) // block_size) for sequence in sequences)


@torch.inference_mode()
def run_whole(model: Model, cache: Any, sequences: Sequence[TokenIds], block_size: int) -> Tensor:
    """Hidden states after the final norm of every token, [num_tokens, hidden_size], sequence after sequence.

    sequences: none empty. cache: the model's, of blocks_needed(...) blocks or more; what it held is written over.
    Keys and values are read back from it, as in a job.
    """
    inputs = _inputs(sequences, block_size)
    batch = build_forward_batch(inputs, inputs.seq_lens, lambda array: torch.from_numpy(array).to(model.device))
    return model.forward(batch, cache, batch.prompt_lens)


def _inputs(sequences: Sequence[TokenIds], block_size: int) -> StepInputs:
    """Sequence i has the blocks after those of sequence i - 1, from 0."""
    seq_lens = np.array([len(sequence) for sequence in sequences], np.int32)
    num_blocks = -(-seq_lens // block_size)
    first_blocks = np.cumsum(num_blocks) - num_blocks
    positions = np.concatenate([np.arange(length) for length in seq_lens])
    columns = np.arange(num_blocks.max())
    block_table = np.where(columns < num_blocks[:, None], first_blocks[:, None] + columns, 0)
    return StepInputs(
        token_ids=np.concatenate(sequences).astype(np.int64),
        positions=positions,
        slot_mapping=np.repeat(first_blocks, seq_lens) * block_size + positions,
        block_table=block_table.astype(np.int32),
        cu_seqlens_q=np.concatenate([[0], np.cumsum(seq_lens)]).astype(np.int32),
        seq_lens=seq_lens,
        logits_indices=np.zeros(0, np.int64),
    )
