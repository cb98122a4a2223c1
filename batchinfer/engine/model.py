"""What the engine asks of a model. Fulfilled by models.decoder.Decoder, and in tests by stand-ins without weights."""

from typing import Any, Protocol

import torch
from torch import Tensor

from batchinfer.engine.input_builder import ForwardBatch


class Model(Protocol):
    """`cache` is handed through to it. Neither method waits for the device."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def device(self) -> torch.device: ...

    def forward(self, batch: ForwardBatch, cache: Any, prompt_lens: Tensor) -> Tensor:
        """Hidden states after the last norm [num_tokens, hidden_size]; the batch's keys and values go to the cache.
        prompt_lens: the batch's, for rotary embeddings whose frequencies depend on the prompt's length.

        Rows of tokens that batch.wanted leaves out only tell, by being finite, that all numbers are that others may
        read of the token.

        Rows that fill up a captured step have a slot_mapping of -1 and a seq_len of 0: nothing of the cache is read or
        written for them, and their hidden states mean nothing."""
        ...

    def compute_logits(self, hidden: Tensor, scratch: Tensor | None = None) -> Tensor:
        """[n, hidden_size] -> [n, vocab_size], of a float dtype. scratch: an earlier result, whose memory may be used
        again."""
        ...
