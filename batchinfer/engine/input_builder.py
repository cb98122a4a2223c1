"""The tensors of one step, made from the persistent batch's arrays. Called by the model runner; read by the model."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from batchinfer.engine.device_queue import Array
from batchinfer.engine.key_stacks import KeyStacks
from batchinfer.engine.persistent_batch import StepInputs


@dataclass(frozen=True, slots=True)
class WantedTokens:
    """The tokens whose hidden states are asked for, each sequence's last ones, and the sequences that have any. Query
    tokens of sequence i are [cu_seqlens_q[i], cu_seqlens_q[i + 1]) of `tokens`."""

    tokens: Tensor  # int64 [num_wanted], rising
    block_table: Tensor  # int32 [num_seqs, max_blocks]
    cu_seqlens_q: Tensor  # int32 [num_seqs + 1]
    seq_lens: Tensor  # int32 [num_seqs]
    stacks: Tensor | None = None  # int32 [num_seqs, width]


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """A ragged batch without padding; sequences stand in batch order, the tokens of one are consecutive.

    Sequence i computes tokens [cu_seqlens_q[i], cu_seqlens_q[i + 1]); they are the last ones of its seq_lens[i] tokens.
    """

    token_ids: Tensor  # int64 [num_tokens]
    positions: Tensor  # int64 [num_tokens], place in the sequence
    slot_mapping: Tensor  # int64 [num_tokens], place in the KV cache: block * block_size + offset
    block_table: Tensor  # int32 [num_seqs, max_blocks]
    cu_seqlens_q: Tensor  # int32 [num_seqs + 1]
    seq_lens: Tensor  # int32 [num_seqs], context with the current chunk
    prompt_lens: Tensor  # int32 [num_seqs], tokens of the whole prompt
    stacks: Tensor | None = None  # int32 [num_seqs, width], as paged_attention has it; None: the device needs none
    wanted: WantedTokens | None = None  # None: all tokens


def build_forward_batch(
    inputs: StepInputs,
    prompt_lens: npt.NDArray[np.int32],
    upload: Callable[[Array], Tensor],
    stacks: npt.NDArray[np.int32] | None = None,
    wanted: WantedTokens | None = None,
) -> ForwardBatch:
    """token_ids as the inputs have them: of tokens that are not known yet, -1."""
    return ForwardBatch(
        token_ids=upload(inputs.token_ids),
        positions=upload(inputs.positions),
        slot_mapping=upload(inputs.slot_mapping),
        block_table=upload(inputs.block_table),
        cu_seqlens_q=upload(inputs.cu_seqlens_q),
        seq_lens=upload(inputs.seq_lens),
        prompt_lens=upload(prompt_lens),
        stacks=None if stacks is None else upload(stacks),
        wanted=wanted,
    )


def wanted_tokens(
    inputs: StepInputs,
    samples: npt.NDArray[np.bool_],
    scores: npt.NDArray[np.bool_],
    upload: Callable[[Array], Tensor],
    key_stacks: KeyStacks | None = None,
) -> WantedTokens | None:
    """samples: the sequences whose last token is wanted; scores: those whose tokens all are. None where that is the
    whole batch. What sequences attend to together is not looked for again: it would save one layer a part."""
    stops = inputs.cu_seqlens_q[1:]
    counts = np.where(scores, np.diff(inputs.cu_seqlens_q), samples)
    if counts.sum() == len(inputs.token_ids):
        return None
    rows = np.flatnonzero(counts)
    counts = counts[rows]
    offsets = np.concatenate([[0], np.cumsum(counts)])
    tokens = np.repeat(stops[rows] - offsets[1:], counts) + np.arange(offsets[-1])
    return WantedTokens(
        tokens=upload(tokens),
        block_table=upload(inputs.block_table[rows]),
        cu_seqlens_q=upload(offsets.astype(np.int32)),
        seq_lens=upload(inputs.seq_lens[rows]),
        stacks=None if key_stacks is None else upload(key_stacks.alone(len(rows))),
    )


def fill_in_tokens(token_ids: Tensor, slots: Tensor, last_tokens: Tensor) -> Tensor:
    """int64 [num_tokens]: token_ids, and in place of each -1 the token last sampled in its slot. slots: int64
    [num_tokens]; last_tokens: int64 [num_slots]."""
    return torch.where(token_ids < 0, last_tokens[slots], token_ids)
