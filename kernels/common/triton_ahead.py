"""Compiles the Triton kernels of an operation for a device that need not be there: a stand-in for Triton's driver takes
the launches, and keeps what would have run. Used by the gates of `bench kernels` and by tests."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import triton
from batchinfer.kernels.common.triton_targets import TARGETS, Target
from triton.compiler import CompiledKernel

_FIRST_DEVICE = 1000  # Triton keeps compiled kernels by device number; no real device has these


class Launches:
    """What an operation launched: each compiled kernel in order, once a launch."""

    def __init__(self) -> None:
        self.kernels: list[CompiledKernel] = []

    @property
    def distinct(self) -> list[CompiledKernel]:
        return list({id(kernel): kernel for kernel in self.kernels}.values())


class _Driver:
    """The part of triton.backends.driver.DriverBase that a launch uses."""

    def __init__(self, target: Target, launches: Launches) -> None:
        self._target = target
        self.launcher_cls = lambda source, metadata: lambda *arguments: None
        self.utils = SimpleNamespace(
            get_device_properties=lambda device: {"max_shared_mem": 1 << 30},  # the gates report, nothing raises here
            load_binary=lambda *arguments: (None, None, 0, 0, 1024),
        )

    def get_current_device(self) -> int:
        return _FIRST_DEVICE + list(TARGETS).index(self._target.name)

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> Any:
        return self._target.triton


@contextmanager
def ahead_of_time(target: Target) -> Iterator[Launches]:
    """Within it, operations given tensors on the `meta` device compile their kernels for `target` and launch nothing.

    Tensors without data also show that an operation reads nothing back from the device: it would raise.
    """
    launches = Launches()
    config = triton.runtime.driver
    previous, run = config._active, triton.runtime.jit.JITFunction.run

    def recorded(self: Any, *args: Any, **kwargs: Any) -> Any:
        kernel = run(self, *args, **kwargs)
        launches.kernels.append(kernel)
        return kernel

    config.set_active(_Driver(target, launches))
    triton.runtime.jit.JITFunction.run = recorded
    try:
        yield launches
    finally:
        triton.runtime.jit.JITFunction.run = run
        config._active = previous
