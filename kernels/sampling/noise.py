"""Sampling noise that depends on (key, position, token id) alone: Philox4x32-10 words turned into Gumbel variates.
Called by the sampling operation.

Source: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011."""

import torch
from torch import Tensor

_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10

Counter = tuple[Tensor, Tensor, Tensor, Tensor]


def philox4x32(counter: Counter, key: tuple[Tensor, Tensor]) -> Counter:
    """Philox4x32-10: four 32-bit words from a 128-bit counter and a 64-bit key.

    All tensors are int64 holding unsigned 32-bit values, of shapes that broadcast together.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        # int64 products wrap as two's complement; the shift drags sign bits in above bit 31, which the masks remove
        product0, product1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0 = ((product1 >> 32) ^ (c1 ^ k0)) & _MASK
        c2 = ((product0 >> 32) ^ (c3 ^ k1)) & _MASK
        c1, c3 = product1, product0  # their upper halves go at the next mask
        k0, k1 = (k0 + _WEYL[0]) & _MASK, (k1 + _WEYL[1]) & _MASK
    return c0, c1 & _MASK, c2, c3 & _MASK


def gumbel_noise(keys: Tensor, positions: Tensor, vocab_size: int) -> Tensor:
    """Standard Gumbel variates, float32 [n, vocab_size], always finite.

    keys: int64 [n], the bits of the requests' 64-bit noise keys; positions: int64 [n], place of the token to sample in
    its sequence. Token t takes word t % 4 of the counter (t // 4, position, 0, 0).
    """
    groups = torch.arange((vocab_size + 3) // 4, device=keys.device)[None, :]
    zero = torch.zeros((1, 1), dtype=torch.int64, device=keys.device)
    key = (keys & _MASK)[:, None], ((keys >> 32) & _MASK)[:, None]
    words = philox4x32((groups, positions[:, None], zero, zero), key)
    return _to_gumbel(torch.stack(words, dim=-1).flatten(-2)[:, :vocab_size])


def _to_gumbel(words: Tensor) -> Tensor:
    """-log(-log(1 - u)) with u in (0, 1): u keeps its relative precision near 0, where large variates come from."""
    u = words.to(torch.float32).add_(0.5).mul_(2.0**-32).clamp_(max=1 - 2.0**-24)
    return u.neg_().log1p_().neg_().log_().neg_()
