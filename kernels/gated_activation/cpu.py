"""Native CPU backend of gated_activation."""

import functools
from collections.abc import Callable
from ctypes import c_int64, c_void_p

import torch
from batchinfer.kernels.common import native

GATES = {"silu": 0, "gelu_tanh": 1}  # as Gate in gate.h; torch's error function is vectorised already


@functools.cache
def _run() -> Callable[..., None]:
    shapes = (c_int64, c_int64, c_int64)
    return native.function("gated_activation", "gated_activation", c_void_p, *shapes, c_void_p, *[c_int64] * 3)


def can_run(gate_up: torch.Tensor, kind: str) -> bool:
    return kind in GATES and native.can_run("gated_activation", gate_up)


def gated_activation(gate_up: torch.Tensor, kind: str) -> torch.Tensor:
    """See the package's `gated_activation`."""
    gate_up = gate_up.contiguous()
    width = gate_up.shape[-1]
    n = width // 2
    out = torch.empty(*gate_up.shape[:-1], n, dtype=gate_up.dtype)
    _run()(
        *(gate_up.data_ptr(), gate_up.numel() // max(1, width), n, width, out.data_ptr()),
        *(GATES[kind], native.FORMATS[gate_up.dtype], torch.get_num_threads()),
    )
    return out
