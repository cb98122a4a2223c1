"""The one place where activations meet a weight matrix; attention, mlp and the decoder's head call it."""

import torch
import torch.nn.functional as F
from torch import Tensor

ROW_MULTIPLE = 4


class Linear:
    """y = x W^T + b, with a row's result independent of how many rows there are.

    weight: [out_features, in_features]; bias: [out_features] or None, the weight's dtype.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.weight = weight
        self.bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        """x: [num_rows, in_features] to [num_rows, out_features]."""
        num_rows = x.shape[0]
        missing = -num_rows % ROW_MULTIPLE
        # The CPU's float32 product shares rows among threads, and a share of fewer than 4 rows takes other code with
        # another rounding. Multiples of 4 never leave such a share; 16-bit products do not have the fault.
        if missing and x.device.type == "cpu" and x.dtype == torch.float32:
            return F.linear(F.pad(x, (0, 0, 0, missing)), self.weight, self.bias)[:num_rows]
        return F.linear(x, self.weight, self.bias)
