"""Small integers out of the words that checkpoints pack them in, and the order of inputs that groups of them follow.
Used by the format readers."""

import torch
from torch import Tensor


def unpack(words: Tensor, bits: int, count: int) -> Tensor:
    """The first `count` fields of each row of `words`, as uint8 [..., count].

    words: integers of any width [..., W]; fields of `bits` (2, 3, 4 or 8) follow each other from the lowest bit up, a
    3-bit one across the border of two words where need be.
    """
    octets = words.contiguous().view(torch.uint8)  # the lowest first, as on all machines that torch runs on
    if bits == 8:
        return octets[..., :count].contiguous()
    if bits == 3:
        return _unpack_3_bits(octets)[..., :count].contiguous()
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=words.device)
    return ((octets.unsqueeze(-1) >> shifts) & (2**bits - 1)).flatten(-2)[..., :count].contiguous()


def _unpack_3_bits(octets: Tensor) -> Tensor:
    """Three octets hold eight fields."""
    padded = torch.nn.functional.pad(octets, (0, -octets.shape[-1] % 3)).unflatten(-1, (-1, 3)).to(torch.int32)
    joined = padded[..., 0] | padded[..., 1] << 8 | padded[..., 2] << 16
    shifts = torch.arange(0, 24, 3, dtype=torch.int32, device=octets.device)
    return ((joined.unsqueeze(-1) >> shifts) & 7).to(torch.uint8).flatten(-2)


def group_order(group_of_input: Tensor, group_size: int) -> Tensor | None:
    """The order of inputs, int64 [K], in which groups are `group_size` consecutive ones; None where the inputs have it.

    group_of_input: integers [K] (GPTQ's g_idx). Raises ValueError where groups are of other sizes.
    """
    groups = group_of_input.to(torch.int64)
    expected = torch.arange(len(groups), device=groups.device) // group_size
    if torch.equal(groups, expected):
        return None
    order = torch.argsort(groups, stable=True)
    if not torch.equal(groups[order], expected):
        raise ValueError(f"does not put {group_size} inputs into each group")
    return order
