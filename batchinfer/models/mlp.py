"""The gated MLP of a decoder layer."""

from torch import Tensor

from batchinfer.kernels.gated_activation import gated_activation
from batchinfer.models.linear import Int8Linear, PackedLinear, Projection
from batchinfer.models.spec import Activation


class GatedMLP:
    """down(act(gate(x)) * up(x)); gate_up stacks the gate's rows over the up projection's."""

    def __init__(self, gate_up: Projection, down: Projection, activation: Activation) -> None:
        self._gate_up = gate_up
        self._down = down
        self._activation = activation
        # Which applies the gate itself.
        self._gating = gate_up if isinstance(gate_up, PackedLinear | Int8Linear) and gate_up.can_gate else None

    def __call__(self, hidden: Tensor) -> Tensor:
        """[num_tokens, hidden_size] to the same."""
        if self._gating is not None:
            return self._down(self._gating.gated(hidden, self._activation))
        return self._down(gated_activation(self._gate_up(hidden), self._activation))
