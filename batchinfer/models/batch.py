"""What a decoder needs to know of a batch. Structural: engine's ForwardBatch fits it without models knowing engine."""

from typing import Protocol

from torch import Tensor


class Contexts(Protocol):
    """Sequences as paged_attention takes them: the queries of sequence i are rows [cu_seqlens_q[i],
    cu_seqlens_q[i + 1])."""

    @property
    def block_table(self) -> Tensor: ...  # int32 [num_seqs, max_blocks]
    @property
    def cu_seqlens_q(self) -> Tensor: ...  # int32 [num_seqs + 1]
    @property
    def seq_lens(self) -> Tensor: ...  # int32 [num_seqs], context with the current chunk
    @property
    def stacks(self) -> Tensor | None: ...  # of paged_attention, where a device is told


class Wanted(Contexts, Protocol):
    """Some of a batch's tokens, the last ones of their sequences, and those sequences with these as queries."""

    @property
    def tokens(self) -> Tensor: ...  # int64 [num_wanted], rising; may be none


class Batch(Contexts, Protocol):
    """A ragged batch: the tokens of sequence i are rows [cu_seqlens_q[i], cu_seqlens_q[i + 1])."""

    @property
    def token_ids(self) -> Tensor: ...  # int64 [num_tokens]
    @property
    def positions(self) -> Tensor: ...  # int64 [num_tokens]
    @property
    def slot_mapping(self) -> Tensor: ...  # int64 [num_tokens], block * block_size + offset
    @property
    def wanted(self) -> Wanted | None: ...  # the tokens whose hidden states are asked for; None: all
