"""Choosing tokens from logits: adjustments, filters, counter-based noise, log-probabilities. Called by the engine's
sampler. All but `greedy` is plain torch, which runs on any device."""

import torch
from batchinfer.kernels.sampling import cpu, reference
from batchinfer.kernels.sampling.noise import gumbel_noise, philox4x32
from batchinfer.kernels.sampling.reference import (
    add_bias,
    apply_penalties,
    mask_tokens,
    rows_per_block,
    sample,
    token_logprobs,
)

__all__ = [
    "add_bias",
    "apply_penalties",
    "greedy",
    "gumbel_noise",
    "mask_tokens",
    "philox4x32",
    "rows_per_block",
    "sample",
    "token_logprobs",
]


def greedy(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """logits [n, vocab], of a float dtype -> (token ids int64 [n], is_finite bool [n]).

    The lowest id wins a tie. A row with a NaN or +inf, or with nothing but -inf, is not finite: its id means nothing.
    """
    return (cpu if cpu.can_run(logits) else reference).greedy(logits)
