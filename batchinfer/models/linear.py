"""The one place where activations meet a weight matrix; attention, mlp and the decoder's head call it."""

import torch
import torch.nn.functional as F
from torch import Tensor

LEAST_ROWS = 8


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
        # With few rows the CPU's float32 product takes other code with another rounding. bf16 does not.
        if num_rows < LEAST_ROWS and x.device.type == "cpu" and x.dtype == torch.float32:
            return F.linear(F.pad(x, (0, 0, 0, LEAST_ROWS - num_rows)), self.weight, self.bias)[:num_rows]
        return F.linear(x, self.weight, self.bias)
