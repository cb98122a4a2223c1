"""The tensors of one step, made from the persistent batch's arrays. Called by the model runner; read by the model."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from batchinfer.engine.persistent_batch import StepInputs


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


def build_forward_batch(inputs: StepInputs, prompt_lens: npt.NDArray[np.int32], device: torch.device) -> ForwardBatch:
    """On a GPU the copies go through pinned memory and do not wait."""

    def tensor(array: npt.NDArray[np.generic]) -> Tensor:
        host = torch.from_numpy(array)
        return host if device.type == "cpu" else host.pin_memory().to(device, non_blocking=True)

    return ForwardBatch(
        token_ids=tensor(inputs.token_ids),
        positions=tensor(inputs.positions),
        slot_mapping=tensor(inputs.slot_mapping),
        block_table=tensor(inputs.block_table),
        cu_seqlens_q=tensor(inputs.cu_seqlens_q),
        seq_lens=tensor(inputs.seq_lens),
        prompt_lens=tensor(prompt_lens),
    )
