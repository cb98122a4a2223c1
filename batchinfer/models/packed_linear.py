"""A projection whose weight lies in the order that oneDNN's bf16 product reads it in. Built by weights in place of
Linear on CPUs that have such products."""

import torch
from torch import Tensor

_ROWS = 256  # number of rows that the order is best for; any number gives the same bits


class PackedLinear:
    """Linear's results, bit by bit, without packing the weight anew at each call. It keeps no other copy of the weight.

    weight: bf16 [out_features, in_features]; bias: [out_features] or None.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight, _ROWS)
        self._bias = bias
        self._nbytes = weight.nbytes + (0 if bias is None else bias.nbytes)

    @staticmethod
    def can_pack(weight: Tensor) -> bool:
        return (
            weight.is_cpu
            and weight.dtype == torch.bfloat16
            and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")  # not on each platform
            and torch.ops.mkldnn._is_mkldnn_bf16_supported()
        )

    @property
    def nbytes(self) -> int:
        return self._nbytes

    def __call__(self, x: Tensor) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, "none", [], "")

    def fill(self, out: Tensor, x: Tensor) -> None:
        out.copy_(self(x))
