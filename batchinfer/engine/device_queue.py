"""How the model runner hands work to a device and gets numbers back: in order, and without waiting for them. Here for a
CPU; in staged_queue.py for devices that run beside the host."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy.typing as npt
import torch
from torch import Tensor

Array = npt.NDArray[Any]
Work = Callable[[], Sequence[Tensor]]


class Fetch(Protocol):
    """What launched work brings back."""

    def result(self) -> Sequence[Array]:
        """Waits for the end of the work; raises what it raised, where launching did not."""
        ...


class Stamp(Protocol):
    """A moment of the device."""

    def seconds_until(self, later: Any) -> float:
        """later: a stamp of the same queue. To be asked once the work after both has been fetched."""
        ...


class DeviceQueue(Protocol):
    """A device that runs what it is given in order, at some time. Work reads tensors and what never changes, no state
    of the host, which may be several steps ahead."""

    def upload(self, array: Array) -> Tensor:
        """A tensor of the device that holds, for work launched from now on, what the array holds now."""
        ...

    def launch(self, work: Work) -> Fetch:
        """Queues work; the tensors that it returns are copied to the host. May raise what the work raises."""
        ...

    def stamp(self) -> Stamp:
        """When everything launched so far will have ended; called within work, when what it has done so far will."""
        ...


@dataclass(frozen=True, slots=True)
class HostStamp:
    """A moment of the host's clock."""

    seconds: float

    def seconds_until(self, later: "HostStamp") -> float:
        return later.seconds - self.seconds


@dataclass(frozen=True, slots=True)
class Fetched:
    """Of work that has ended."""

    arrays: Sequence[Array]

    def result(self) -> Sequence[Array]:
        return self.arrays


class ImmediateQueue:
    """The CPU: work runs where it is launched, and nothing is copied, so an uploaded array must not change."""

    def upload(self, array: Array) -> Tensor:
        return torch.from_numpy(array)

    def launch(self, work: Work) -> Fetched:
        return Fetched([tensor.numpy() for tensor in work()])

    def stamp(self) -> HostStamp:
        return HostStamp(time.perf_counter())
