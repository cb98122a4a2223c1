"""Choosing tokens from logits: adjustments, filters, counter-based noise, log-probabilities. Called by the engine's
sampler. All but `greedy` and the draw of `sample` is plain torch, which runs on any device."""

import torch
from batchinfer.kernels.sampling import cpu, reference
from batchinfer.kernels.sampling.noise import gumbel_noise, philox4x32
from batchinfer.kernels.sampling.reference import (
    add_bias,
    apply_penalties,
    mask_tokens,
    rows_per_block,
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


def sample(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    min_p: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    noise_keys: torch.Tensor,
    positions: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draws a token a row: argmax of the filtered logits plus Gumbel noise. Overwrites logits.

    logits float32 [n, vocab], n at most rows_per_block(vocab) for speed and memory; temperature float32 [n], each above
    0; min_p float32 [n], 0 is off; top_k int64 [n], 0 is off; top_p float32 [n], 1 is off; noise_keys, positions int64
    [n] as in gumbel_noise. Returns what `greedy` does. Tokens tied with the last one that a filter keeps are kept too.

    The backends make noise of the same random words, equal to a few units in the last place: they can draw differently
    only where two tokens come out that close.
    """
    if reference.has_filters(min_p, top_k, top_p):
        logits = reference.scale_and_filter(logits, temperature, min_p, top_k, top_p)
        temperature = torch.ones_like(temperature)
    return (cpu if cpu.can_run(logits) else reference).draw(logits, temperature, noise_keys, positions)
