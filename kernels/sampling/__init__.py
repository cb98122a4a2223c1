"""Choosing tokens from logits: adjustments, filters, counter-based noise, log-probabilities. Called by the engine's
sampler. One backend so far, plain torch, which runs on any device."""

from batchinfer.kernels.sampling.noise import gumbel_noise, philox4x32
from batchinfer.kernels.sampling.reference import (
    add_bias,
    apply_penalties,
    greedy,
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
