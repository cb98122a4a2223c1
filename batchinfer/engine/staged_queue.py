"""The queue of a device that runs beside the host. Arrays go over in parcels through page-locked buffers, one copy for
what is uploaded before a launch; results come back into buffers of their own. Nothing here waits but Fetch.result."""

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from batchinfer.engine.device_queue import Array, Stamp, Work

_ALIGNMENT = 64  # bytes; Triton compiles kernels anew for pointers that are not multiples of 16
_LEAST_BYTES = 1 << 16  # of a parcel


class Mark(Protocol):
    """A place in the order of a lane's work."""

    def is_reached(self) -> bool:
        """Whether all work before it has ended; does not wait."""
        ...

    def wait(self) -> None:
        """Until all work before it has ended. Raises what that work raised, where enqueuing did not."""
        ...


class Lane(Protocol):
    """One stream of a device."""

    @property
    def device(self) -> torch.device: ...

    def host_buffer(self, num_bytes: int) -> Tensor:
        """uint8 [num_bytes] of the host's memory that the device copies from and to without waiting."""
        ...

    def enqueue(self, work: Callable[[], None]) -> None:
        """What the work does to tensors is done after what was enqueued before. Copies between `host_buffer`s and the
        device read and write the host's side at that time, too."""
        ...

    def mark(self) -> Mark: ...

    def stamp(self) -> Stamp: ...


class _Parcel:
    """Arrays side by side in a buffer of the host, and their places on the device."""

    def __init__(self, host: Tensor, device: torch.device) -> None:
        self.host = host
        self._device = torch.empty(len(host), dtype=torch.uint8, device=device)
        self._size = 0

    def has_room(self, num_bytes: int) -> bool:
        return self._size + num_bytes <= len(self.host)

    def add(self, array: Array) -> Tensor:
        source = torch.from_numpy(array)
        place = slice(self._size, self._size + source.nbytes)
        self._size = _aligned(place.stop)
        self.host[place].view(source.dtype).view(source.shape).copy_(source)
        return self._device[place].view(source.dtype).view(source.shape)

    def copy(self) -> None:
        self._device[: self._size].copy_(self.host[: self._size], non_blocking=True)


class _StagedFetch:
    """Results on their way to the host."""

    def __init__(self, lane: Lane, work: Work) -> None:
        self._hosts: list[Tensor] = []
        lane.enqueue(lambda: self._hosts.extend(_to_host(lane, tensor) for tensor in work()))
        self._mark = lane.mark()

    def result(self) -> list[Array]:
        self._mark.wait()
        return [host.numpy() for host in self._hosts]


class StagedQueue:
    """DeviceQueue over a lane.

    A buffer that a parcel is copied from is written again only once the mark after the copy has been reached; until
    then another one is taken, so there are as many as steps in flight need.
    """

    def __init__(self, lane: Lane) -> None:
        self._lane = lane
        self._parcel: _Parcel | None = None  # not sent yet
        self._buffers: list[tuple[Tensor, Mark]] = []  # sent, with the mark after the copy

    def upload(self, array: Array) -> Tensor:
        if self._parcel is None or not self._parcel.has_room(array.nbytes):
            self._send()
            self._parcel = _Parcel(self._free_buffer(array.nbytes), self._lane.device)
        return self._parcel.add(array)

    def launch(self, work: Work) -> _StagedFetch:
        self._send()
        return _StagedFetch(self._lane, work)

    def stamp(self) -> Stamp:
        return self._lane.stamp()

    def _send(self) -> None:
        parcel, self._parcel = self._parcel, None
        if parcel is not None:
            self._lane.enqueue(parcel.copy)
            self._buffers.append((parcel.host, self._lane.mark()))

    def _free_buffer(self, num_bytes: int) -> Tensor:
        for place, (buffer, mark) in enumerate(self._buffers):
            if len(buffer) >= num_bytes and mark.is_reached():
                del self._buffers[place]
                return buffer
        return self._lane.host_buffer(max(_LEAST_BYTES, 1 << (num_bytes - 1).bit_length()))


def _to_host(lane: Lane, tensor: Tensor) -> Tensor:
    host = lane.host_buffer(tensor.nbytes).view(tensor.dtype).view(tensor.shape)
    return host.copy_(tensor, non_blocking=True)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
