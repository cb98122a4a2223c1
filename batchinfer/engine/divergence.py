"""How far the token distributions of two runs over the same text lie apart, in bounded memory. Used by the KV guard of
executors/ and by evaluation/."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

_ELEMENTS = 2**24  # logits of a side held at once: 64 MiB of float32, or one row where the vocabulary is larger
_BLOCK_ELEMENTS = 2**19  # of them, those worked on at once: they stay in the processor's cache
Floats = npt.NDArray[np.float32]


class Head(Protocol):
    """What makes logits of hidden states: a decoder."""

    @property
    def vocab_size(self) -> int: ...

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """[n, hidden_size] -> [n, vocab_size], of a float dtype."""
        ...


@dataclass(frozen=True, slots=True)
class Divergence:
    """Of each position, in text order.

    kl: nats, the sum over the vocabulary of p (log p - log q), where p is the reference's. NaN where a side's numbers
    are not finite.
    """

    kl: Floats  # [n]
    same_top: npt.NDArray[np.bool_]  # [n], whether both hold the same token for the likeliest

    @property
    def mean_kl(self) -> float:
        return float(self.kl.mean(dtype=np.float64))

    @property
    def top1_agreement(self) -> float:
        """Share of the positions, 0 to 1."""
        return float(self.same_top.mean())


def join(parts: list[Divergence]) -> Divergence:
    """parts: at least one."""
    return Divergence(np.concatenate([part.kl for part in parts]), np.concatenate([part.same_top for part in parts]))


@torch.inference_mode()
def score(head: Head, hidden: Tensor, targets: Tensor) -> Floats:
    """float32 [n]: the natural log-probability of targets[i] (int64 [n]) after hidden[i] ([n, hidden_size])."""
    return _numpy(torch.cat([_gather(block, targets[rows]) for rows, block in _log_softmax(head, hidden)]))


@torch.inference_mode()
def compare(head: Head, hidden: Tensor, reference_hidden: Tensor) -> Divergence:
    """Of n positions of the same model over the same tokens. hidden, reference_hidden: [n, hidden_size]."""
    pairs = zip(_log_softmax(head, hidden), _log_softmax(head, reference_hidden), strict=True)
    return join([_diverge(block, reference) for (_, block), (_, reference) in pairs])


@torch.inference_mode()
def score_against(
    head: Head, hidden: Tensor, reference_head: Head, reference_hidden: Tensor, targets: Tensor
) -> tuple[Floats, Floats, Divergence]:
    """score() of both sides and their divergence, each of n positions. Both have the same vocabulary."""
    scores, reference_scores, parts = [], [], []
    pairs = zip(_log_softmax(head, hidden), _log_softmax(reference_head, reference_hidden), strict=True)
    for (rows, block), (_, reference) in pairs:
        scores.append(_gather(block, targets[rows]))
        reference_scores.append(_gather(reference, targets[rows]))
        parts.append(_diverge(block, reference))
    return _numpy(torch.cat(scores)), _numpy(torch.cat(reference_scores)), join(parts)


def _log_softmax(head: Head, hidden: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """(rows, float32 [rows, vocab_size]) in blocks, the same for any two heads of one vocabulary."""
    rows_at_once, block_rows = (max(1, size // head.vocab_size) for size in (_ELEMENTS, _BLOCK_ELEMENTS))
    for first in range(0, len(hidden), rows_at_once):
        logits = head.compute_logits(hidden[first : first + rows_at_once])
        for start in range(0, len(logits), block_rows):
            block = logits[start : start + block_rows].float().log_softmax(dim=-1)
            yield slice(first + start, first + start + len(block)), block


def _gather(logprobs: Tensor, token_ids: Tensor) -> Tensor:
    return logprobs.gather(-1, token_ids[:, None]).squeeze(-1)


def _diverge(logprobs: Tensor, reference: Tensor) -> Divergence:
    """float32 [n, vocab_size] each; both are overwritten."""
    same_top = logprobs.argmax(dim=-1) == reference.argmax(dim=-1)
    difference = torch.sub(reference, logprobs, out=logprobs)
    kl = difference.mul_(reference.exp_()).sum(dim=-1).clamp_(min=0)  # below 0 by rounding only
    return Divergence(_numpy(kl), same_top.cpu().numpy())


def _numpy(values: Tensor) -> Floats:
    return values.cpu().numpy()
