"""The parts of the overlapped step loop that need CUDA: a lane over the current stream, and the capture of graphs. Made
by executors/; everything that decides anything is in staged_queue.py and cuda_graphs.py, which run on a CPU too."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from batchinfer.engine.cuda_graphs import CapturedRun


class CudaStamp:
    """An event that notes its time."""

    def __init__(self) -> None:
        self._event = torch.cuda.Event(enable_timing=True)
        self._event.record()

    def seconds_until(self, later: "CudaStamp") -> float:
        return self._event.elapsed_time(later._event) / 1e3


class CudaMark:
    """An event after what the stream has been given so far."""

    def __init__(self) -> None:
        self._event = torch.cuda.Event()
        self._event.record()

    def is_reached(self) -> bool:
        return self._event.query()

    def wait(self) -> None:
        self._event.synchronize()


class CudaLane:
    """staged_queue.Lane over the current stream: calls return once their kernels and copies are queued. Memory that
    PyTorch's allocators take back is only handed out again to what this stream does later."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def host_buffer(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def enqueue(self, work: Callable[[], None]) -> None:
        work()

    def mark(self) -> CudaMark:
        return CudaMark()

    def stamp(self) -> CudaStamp:
        return CudaStamp()


class CudaCapture:
    """cuda_graphs.Capture. The graphs share one pool of memory: they never run side by side, and what one returns
    is read before another runs. What runs first, before a capture, compiles kernels and loads libraries."""

    def __init__(self) -> None:
        self._pool: Any = None  # of the first graph

    def __call__(self, run: Callable[[], Tensor]) -> CapturedRun:
        run()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            output = run()
        self._pool = graph.pool()
        return CapturedRun(graph.replay, output)
