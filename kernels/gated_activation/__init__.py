"""The gate of an MLP: act(gate) * up. Called by the decoder's MLP."""

from types import ModuleType
from typing import Literal

import torch
from batchinfer.kernels.gated_activation import cpu, reference

ActivationKind = Literal["silu", "gelu", "gelu_tanh"]
ACTIVATION_KINDS: tuple[ActivationKind, ...] = ("silu", "gelu", "gelu_tanh")


def gated_activation(gate_up: torch.Tensor, kind: ActivationKind) -> torch.Tensor:
    """gate_up: [..., 2 n], the gate in the first half. Returns [..., n] in the same dtype.

    Raises ValueError on a kind that is not in ACTIVATION_KINDS or an odd width.
    """
    if kind not in ACTIVATION_KINDS:
        raise ValueError(f"kind = {kind!r}: must be one of {', '.join(ACTIVATION_KINDS)}")
    if gate_up.shape[-1] % 2:
        raise ValueError(f"gate_up has an odd width, {gate_up.shape[-1]}")
    return _backend(gate_up, kind).gated_activation(gate_up, kind)


def _backend(gate_up: torch.Tensor, kind: str) -> ModuleType:
    if gate_up.is_cuda:
        from batchinfer.kernels.gated_activation import gpu  # here, as it brings Triton

        return gpu
    return cpu if cpu.can_run(gate_up, kind) else reference
