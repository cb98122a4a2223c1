"""How far the token distributions of two runs over the same text lie apart, in bounded memory. Used by the KV guard of
executors/ and by evaluation/."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

_ELEMENTS = 2**22  # logits of one side held at once: 16 MiB of float32, or one row where the vocabulary is larger
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
    return _numpy(
        torch.cat([_gather(_log_softmax(head, hidden[rows]), targets[rows]) for rows in _chunks(head, hidden)])
    )


@torch.inference_mode()
def compare(head: Head, hidden: Tensor, reference_hidden: Tensor) -> Divergence:
    """Of n positions of the same model over the same tokens. hidden, reference_hidden: [n, hidden_size]."""
    parts = [
        _diverge(_log_softmax(head, hidden[rows]), _log_softmax(head, reference_hidden[rows]))
        for rows in _chunks(head, hidden)
    ]
    return join(parts)


@torch.inference_mode()
def score_against(
    head: Head, hidden: Tensor, reference_head: Head, reference_hidden: Tensor, targets: Tensor
) -> tuple[Floats, Floats, Divergence]:
    """score() of both sides and their divergence, each of n positions. Both have the same vocabulary."""
    scores, reference_scores, parts = [], [], []
    for rows in _chunks(head, hidden):
        logprobs = _log_softmax(head, hidden[rows])
        reference = _log_softmax(reference_head, reference_hidden[rows])
        scores.append(_gather(logprobs, targets[rows]))
        reference_scores.append(_gather(reference, targets[rows]))
        parts.append(_diverge(logprobs, reference))
    return _numpy(torch.cat(scores)), _numpy(torch.cat(reference_scores)), join(parts)


def _chunks(head: Head, hidden: Tensor) -> Iterator[slice]:
    step = max(1, _ELEMENTS // head.vocab_size)
    return (slice(start, start + step) for start in range(0, len(hidden), step))


def _log_softmax(head: Head, hidden: Tensor) -> Tensor:
    return head.compute_logits(hidden).float().log_softmax(dim=-1)


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
