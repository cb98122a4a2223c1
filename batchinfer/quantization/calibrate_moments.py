"""What calibration keeps of a linear layer's inputs: their second moments, whole or within groups, and their mean
magnitudes. Filled by conversion/, read by awq_search and gptq_solve."""

import torch
from torch import Tensor

from batchinfer.errors import BatchInferError

_TILE = 512  # columns; only tiles on and above the diagonal are computed


class InputMoments:
    """Sums over the inputs x that were added, float32. Reading them raises BatchInferError where they are not finite.

    num_inputs: K. group_size: None for the whole x^T x, else only its blocks on the diagonal.
    """

    def __init__(self, num_inputs: int, group_size: int | None = None) -> None:
        self._magnitudes = torch.zeros(num_inputs)
        self._group_size = group_size
        shape = (num_inputs, num_inputs) if group_size is None else (num_inputs // group_size, group_size, group_size)
        self._products = torch.zeros(shape)
        self._num_tokens = 0

    def add(self, inputs: Tensor) -> None:
        """inputs: [num_tokens, K], any float dtype."""
        x = inputs.to(torch.float32)
        self._num_tokens += len(x)
        self._magnitudes += x.abs().sum(0)
        if self._group_size is not None:
            groups = x.unflatten(1, (-1, self._group_size)).transpose(0, 1)
            self._products.baddbmm_(groups.mT, groups)
            return
        for start in range(0, x.shape[1], _TILE):
            tile = slice(start, start + _TILE)
            self._products[tile, start:].addmm_(x[:, tile].T, x[:, start:])

    @property
    def mean_magnitudes(self) -> Tensor:
        """mean |x|, float32 [K]"""
        return _finite(self._magnitudes / max(self._num_tokens, 1))

    @property
    def products(self) -> Tensor:
        """x^T x divided by the number of tokens: [K, K], or its blocks [K / group_size, group_size, group_size]."""
        products = self._products / max(self._num_tokens, 1)
        _finite(products.diagonal(dim1=-2, dim2=-1))  # no other element is larger
        return products if self._group_size is not None else products.triu().add_(products.triu(1).T)


def _finite(sums: Tensor) -> Tensor:
    if not bool(sums.isfinite().all()):
        raise BatchInferError(
            "the inputs of its weights are NaN or infinite on the calibration text; evaluate the model to see whether "
            "it works at all, or choose another --calibration"
        )
    return sums
