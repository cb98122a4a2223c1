"""Log-probabilities of prompt tokens, in bounded memory: computed chunk by chunk by the model runner, gathered by the
engine."""

import math
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from batchinfer.kernels import sampling
from batchinfer.request import PromptLogprobs

_ELEMENTS = 2**22  # logits held at once: 16 MiB of float32, or one row where the vocabulary is larger


def score_tokens(
    compute_logits: Callable[[Tensor], Tensor], hidden: Tensor, token_ids: Tensor, vocab_size: int
) -> Tensor:
    """float32 [n]: log-probability of token_ids[i] (int64 [n]) after hidden[i] ([n, hidden_size]).

    Beside its arguments it holds at most max(1, 2**22 // vocab_size) rows of logits and their row blocks.
    """
    rows = max(1, _ELEMENTS // vocab_size)
    parts = [
        sampling.token_logprobs(compute_logits(chunk).float(), ids, 0)[0]
        for chunk, ids in zip(hidden.split(rows), token_ids.split(rows), strict=True)
    ]
    return torch.cat(parts)


class PromptScores:
    """Gathers the scores of one prompt. Chunks come in order; what is computed again after a preemption is ignored, and
    so is what follows a gap: the sequence was started over when its numbers broke, and that chunk was under way."""

    def __init__(self, num_prompt_tokens: int) -> None:
        self._per_token = np.empty(num_prompt_tokens - 1, np.float32)  # the first token has no score
        self._num_scored = 0

    def add(self, start: int, values: npt.NDArray[np.float32]) -> None:
        """values[i] is the score of prompt token start + 1 + i."""
        end = start + len(values)
        if start <= self._num_scored < end:
            self._per_token[self._num_scored : end] = values[self._num_scored - start :]
            self._num_scored = end

    def result(self) -> PromptLogprobs:
        """Raises RuntimeError where a chunk is missing."""
        if self._num_scored != len(self._per_token):
            raise RuntimeError(f"{self._num_scored} of {len(self._per_token)} prompt tokens were scored")
        return PromptLogprobs(math.fsum(self._per_token), self._num_scored, self._per_token)
