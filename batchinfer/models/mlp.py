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

    def __call__(self, hidden: Tensor) -> Tensor:
        """[num_tokens, hidden_size] to the same."""
        gate_up = self._gate_up
        if isinstance(gate_up, PackedLinear | Int8Linear) and gate_up.can_gate:
            return self._down(gate_up.gated(hidden, self._activation))
        return self._down(gated_activation(gate_up(hidden), self._activation))
