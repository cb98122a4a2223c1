"""Plain torch specification of rotary."""

import torch


def rotary(
    q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor, cos_sin_cache: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """See the package's `rotary`."""
    cos, sin = cos_sin_cache[positions].unsqueeze(1).chunk(2, dim=-1)  # [num_tokens, 1, rotary_dim / 2] each
    return _rotate(q, cos, sin), _rotate(k, cos, sin)


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    half = cos.shape[-1]
    first, second = x[..., :half].to(torch.float32), x[..., half : 2 * half].to(torch.float32)
    rotated = torch.empty_like(x, memory_format=torch.contiguous_format)
    rotated[..., :half] = first * cos - second * sin
    rotated[..., half : 2 * half] = second * cos + first * sin
    rotated[..., 2 * half :] = x[..., 2 * half :]
    return rotated
