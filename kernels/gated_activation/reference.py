"""Plain torch specification of gated_activation."""

import torch
import torch.nn.functional as F


def gated_activation(gate_up: torch.Tensor, kind: str) -> torch.Tensor:
    """See the package's `gated_activation`."""
    gate, up = gate_up.chunk(2, dim=-1)
    if kind == "silu":
        return F.silu(gate) * up
    return F.gelu(gate, approximate="tanh" if kind == "gelu_tanh" else "none") * up
