"""Choosing tokens from logits: changes, filters, counter-based noise, log-probabilities. Called by the engine's
sampler. All but `greedy` and `sample` is plain torch, which runs on any device."""

from types import ModuleType

import torch
from batchinfer.kernels.sampling import cpu, reference
from batchinfer.kernels.sampling.changes import Bias, LogitChanges, Penalties, RowTokens
from batchinfer.kernels.sampling.noise import gumbel_noise, philox4x32
from batchinfer.kernels.sampling.reference import rows_per_block, token_logprobs

__all__ = [
    "Bias",
    "LogitChanges",
    "Penalties",
    "RowTokens",
    "greedy",
    "gumbel_noise",
    "philox4x32",
    "rows_per_block",
    "sample",
    "token_logprobs",
]


def greedy(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """logits [n, vocab], of a float dtype -> (token ids int64 [n], is_finite bool [n]).

    The lowest id wins a tie. A row with a NaN or +inf, or with nothing but -inf, is not finite: its id means nothing.
    """
    return _backend(logits).greedy(logits)


def sample(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    min_p: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    noise_keys: torch.Tensor,
    positions: torch.Tensor,
    changes: LogitChanges | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Chooses a token a row: `greedy` of the changed logits where the temperature is 0, elsewhere a draw, the argmax of
    the changed, scaled and filtered logits plus Gumbel noise. Logits are left as they are.

    logits [n, vocab], of a float dtype; temperature float32 [n]; min_p float32 [n], 0 is off, at most 1; top_k int64
    [n], 0 is off; top_p float32 [n], 1 is off; noise_keys, positions int64 [n] as in gumbel_noise. Returns what
    `greedy` does; a row is finite if it is so before and after its changes. Tokens tied with the last one that a filter
    keeps are kept too. Raises ValueError on parameters of another length or dtype.

    The backends make noise of the same random words, equal to a few units in the last place, and sum probabilities to
    about 1e-6: they can choose differently only where two tokens, or a sum and top_p, come out that close.
    """
    _check(len(logits), (temperature, min_p, top_p), (top_k, noise_keys, positions))
    return _backend(logits).sample(logits, temperature, min_p, top_k, top_p, noise_keys, positions, changes)


def _backend(logits: torch.Tensor) -> ModuleType:
    if logits.is_cuda:
        from batchinfer.kernels.sampling import gpu  # here, as it brings Triton

        return gpu
    return cpu if cpu.can_run(logits) else reference


def _check(num_rows: int, floats: tuple[torch.Tensor, ...], integers: tuple[torch.Tensor, ...]) -> None:
    for dtype, columns in ((torch.float32, floats), (torch.int64, integers)):
        for values in columns:
            if values.dtype != dtype or values.shape != (num_rows,):
                raise ValueError(f"{values.dtype} {tuple(values.shape)} where {dtype} ({num_rows},) belongs")
