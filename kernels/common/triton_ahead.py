"""Compiles the Triton kernels of an operation for a device that need not be there: a stand-in for Triton's driver takes
the launches, and keeps what would have run. Used by the gates of `bench kernels` and by tests."""

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import triton
from batchinfer.kernels.common.triton_targets import TARGETS, Target
from triton.compiler import CompiledKernel

_FIRST_DEVICE = 1000  # Triton keeps compiled kernels by device number; no real device has these
_unused_devices = itertools.count(_FIRST_DEVICE + len(TARGETS))


class Launches:
    """What an operation launched: each compiled kernel in order, once a launch."""

    def __init__(self) -> None:
        self.kernels: list[CompiledKernel] = []

    @property
    def distinct(self) -> list[CompiledKernel]:
        return list({id(kernel): kernel for kernel in self.kernels}.values())


class _Driver:
    """The part of triton.backends.driver.DriverBase that a launch uses."""

    def __init__(self, target: Target, device: int) -> None:
        self._target = target
        self._device = device
        self.launcher_cls = lambda source, metadata: lambda *arguments: None
        self.utils = SimpleNamespace(
            get_device_properties=lambda device: {"max_shared_mem": 1 << 30},  # the gates report, nothing raises here
            load_binary=lambda *arguments: (None, None, 0, 0, 1024),
        )

    def get_current_device(self) -> int:
        return self._device

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> Any:
        return self._target.triton


@contextmanager
def ahead_of_time(target: Target) -> Iterator[Launches]:
    """Within it, operations given tensors on the `meta` device compile their kernels for `target` and launch nothing.

    Tensors without data also show that an operation reads nothing back from the device: it would raise.
    """
    with _recorded(target, _FIRST_DEVICE + list(TARGETS).index(target.name)) as launches:
        yield launches


class _Variant:
    """Stands for a compiled kernel."""

    function = packed_metadata = None

    def __init__(self, name: str) -> None:
        self.name = name

    def launch_metadata(self, *arguments: Any) -> None:
        """As CompiledKernel's, like the next."""

    def run(self, *arguments: Any) -> None:
        pass


@contextmanager
def variants(target: Target) -> Iterator[Launches]:
    """As ahead_of_time, but nothing is compiled: the kernels of the launches only tell apart what Triton would have
    compiled one by one. Each time nothing is known to begin with."""

    def stand_in(self: Any, key: Any, signature: Any, device: Any, *rest: Any) -> _Variant:
        variant = self.device_caches[device][0][key] = _Variant(self.__name__)
        return variant

    function = triton.runtime.jit.JITFunction
    compiles = function._do_compile
    function._do_compile = stand_in
    try:
        with _recorded(target, next(_unused_devices)) as launches:
            yield launches
    finally:
        function._do_compile = compiles


@contextmanager
def _recorded(target: Target, device: int) -> Iterator[Launches]:
    launches = Launches()
    config = triton.runtime.driver
    previous, run = config._active, triton.runtime.jit.JITFunction.run

    def recorded(self: Any, *args: Any, **kwargs: Any) -> Any:
        kernel = run(self, *args, **kwargs)
        launches.kernels.append(kernel)
        return kernel

    config.set_active(_Driver(target, device))
    triton.runtime.jit.JITFunction.run = recorded
    try:
        yield launches
    finally:
        triton.runtime.jit.JITFunction.run = run
        config._active = previous
