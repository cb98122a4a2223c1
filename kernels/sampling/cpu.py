"""Native CPU backend of greedy and draw."""

import functools
from collections.abc import Callable
from ctypes import c_int64, c_void_p

import torch
from batchinfer.kernels.common import native


@functools.cache
def _run() -> Callable[..., None]:
    return native.function("sampling", "greedy", c_void_p, *[c_int64] * 3, c_void_p, c_void_p, c_int64, c_int64)


@functools.cache
def _run_draw() -> Callable[..., None]:
    return native.function("sampling", "draw", c_void_p, *[c_int64] * 3, *[c_void_p] * 5, c_int64, c_int64)


def can_run(logits: torch.Tensor) -> bool:
    return native.can_run("sampling", logits)


def greedy(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """See the package's `greedy`."""
    logits = native.dense_rows(logits)
    num_rows, vocab_size = logits.shape
    token_ids, is_finite = torch.empty(num_rows, dtype=torch.int64), torch.empty(num_rows, dtype=torch.bool)
    _run()(
        *(logits.data_ptr(), num_rows, vocab_size, logits.stride(0), token_ids.data_ptr(), is_finite.data_ptr()),
        *(native.FORMATS[logits.dtype], torch.get_num_threads()),
    )
    return token_ids, is_finite


def draw(
    logits: torch.Tensor, temperature: torch.Tensor, noise_keys: torch.Tensor, positions: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """As the reference's."""
    logits = native.dense_rows(logits)
    num_rows, vocab_size = logits.shape
    rows = (temperature.to(torch.float32), noise_keys.to(torch.int64), positions.to(torch.int64))
    temperature, noise_keys, positions = (values.contiguous() for values in rows)
    token_ids, is_finite = torch.empty(num_rows, dtype=torch.int64), torch.empty(num_rows, dtype=torch.bool)
    _run_draw()(
        *(logits.data_ptr(), num_rows, vocab_size, logits.stride(0)),
        *(temperature.data_ptr(), noise_keys.data_ptr(), positions.data_ptr()),
        *(token_ids.data_ptr(), is_finite.data_ptr(), native.FORMATS[logits.dtype], torch.get_num_threads()),
    )
    return token_ids, is_finite
