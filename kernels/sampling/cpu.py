"""Native CPU backend of greedy and sample."""

import ctypes
import functools
from collections.abc import Callable
from ctypes import c_int64, c_void_p

import torch
from batchinfer.kernels.common import native
from batchinfer.kernels.sampling.changes import LogitChanges, RowTokens
from torch import Tensor

_NO_CHANGES = LogitChanges(None, None, None)


class _Arguments(ctypes.Structure):
    """As Arguments in cpu.cpp."""

    _fields_ = (
        ("logits", c_void_p),
        *((name, c_int64) for name in ("rows", "n", "stride", "format", "threads")),
        *((name, c_void_p) for name in ("temperature", "min_p", "top_k", "top_p", "noise_keys", "positions")),
        *((name, c_void_p) for name in ("biased_offsets", "biased_ids", "bias")),
        *((name, c_void_p) for name in ("penalised_offsets", "penalised_ids")),
        *((name, c_void_p) for name in ("output_counts", "repetition", "presence", "frequency")),
        *((name, c_void_p) for name in ("barred_offsets", "barred_ids")),
        *((name, c_void_p) for name in ("token_ids", "is_finite")),
    )


@functools.cache
def _run() -> Callable[..., None]:
    return native.function("sampling", "greedy", c_void_p, *[c_int64] * 3, c_void_p, c_void_p, c_int64, c_int64)


@functools.cache
def _run_sample() -> Callable[..., None]:
    return native.function("sampling", "sample", ctypes.POINTER(_Arguments))


def can_run(logits: Tensor) -> bool:
    return native.can_run("sampling", logits)


def greedy(logits: Tensor) -> tuple[Tensor, Tensor]:
    """See the package's `greedy`."""
    logits = native.dense_rows(logits)
    num_rows, vocab_size = logits.shape
    token_ids, is_finite = torch.empty(num_rows, dtype=torch.int64), torch.empty(num_rows, dtype=torch.bool)
    _run()(
        *(logits.data_ptr(), num_rows, vocab_size, logits.stride(0), token_ids.data_ptr(), is_finite.data_ptr()),
        *(native.FORMATS[logits.dtype], torch.get_num_threads()),
    )
    return token_ids, is_finite


def sample(
    logits: Tensor,
    temperature: Tensor,
    min_p: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    noise_keys: Tensor,
    positions: Tensor,
    changes: LogitChanges | None,
) -> tuple[Tensor, Tensor]:
    """See the package's `sample`."""
    logits = native.dense_rows(logits)
    num_rows, vocab_size = logits.shape
    token_ids, is_finite = torch.empty(num_rows, dtype=torch.int64), torch.empty(num_rows, dtype=torch.bool)
    # named, so that copies outlive the call
    dense = [values.contiguous() for values in (temperature, min_p, top_k, top_p, noise_keys, positions)]
    arguments = _Arguments(
        *(logits.data_ptr(), num_rows, vocab_size, logits.stride(0)),
        *(native.FORMATS[logits.dtype], torch.get_num_threads()),
        *(values.data_ptr() for values in dense),
        *_addresses(changes or _NO_CHANGES),
        *(token_ids.data_ptr(), is_finite.data_ptr()),
    )
    _run_sample()(ctypes.byref(arguments))
    return token_ids, is_finite


def _addresses(changes: LogitChanges) -> list[int | None]:
    bias, penalties = changes.bias, changes.penalties
    tensors = [
        *((*_columns(bias.tokens), bias.values) if bias else (None,) * 3),
        *(_columns(penalties.tokens) if penalties else (None,) * 2),
        *((penalties.output_counts, penalties.repetition) if penalties else (None,) * 2),
        *((penalties.presence, penalties.frequency) if penalties else (None,) * 2),
        *(_columns(changes.barred) if changes.barred else (None,) * 2),
    ]
    return [native.address(tensor) for tensor in tensors]


def _columns(tokens: RowTokens) -> tuple[Tensor, Tensor]:
    return tokens.offsets, tokens.token_ids
