"""Small integers packed into the words of checkpoints. Used by the writers of formats."""

import torch
from torch import Tensor

_WORD_BITS = 32


def pack(values: Tensor, bits: int) -> Tensor:
    """int32 [..., ceil(n * bits / 32)]: fields of `bits` follow each other from the lowest bit up, across the border of
    two words where need be; what is left of the last word is 0.

    values: uint8 [..., n], each below 2^bits.
    """
    planes = (values.unsqueeze(-1) >> torch.arange(bits, dtype=torch.uint8)) & 1
    stream = planes.flatten(-2)
    stream = torch.nn.functional.pad(stream, (0, -stream.shape[-1] % _WORD_BITS)).unflatten(-1, (-1, 8))
    octets = (stream << torch.arange(8, dtype=torch.uint8)).sum(-1, dtype=torch.uint8)
    return octets.view(torch.int32)  # the lowest first, as on all machines that torch runs on


def in_input_order(values: Tensor, permutation: Tensor | None) -> Tensor:
    """Columns [N, K] back in the order of the inputs that they meet."""
    return values if permutation is None else values[:, torch.argsort(permutation)]


def group_of_inputs(num_inputs: int, group_size: int, permutation: Tensor | None) -> Tensor:
    """The group of each input, int32 [K]."""
    groups = torch.arange(num_inputs, dtype=torch.int32) // group_size
    return groups if permutation is None else groups[torch.argsort(permutation)]
