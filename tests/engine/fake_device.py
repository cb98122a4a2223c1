"""Devices that run beside the host, played on a CPU: nothing that the host hands over is done before the device gets to
it, page-locked memory is read and written only then, and results are not there before they are waited for."""

import queue
import random
import threading
import time
from collections import deque
from collections.abc import Callable

import torch

from batchinfer.engine.cuda_graphs import CapturedRun
from batchinfer.engine.device_queue import HostStamp

GARBAGE = 0xA5


class FakeStamp:
    def __init__(self) -> None:
        self.seconds: float | None = None

    def take(self) -> None:
        self.seconds = time.perf_counter()

    def seconds_until(self, later: "FakeStamp | HostStamp") -> float:
        return later.seconds - self.seconds


class LateMark:
    def __init__(self, lane: "LateLane") -> None:
        self._lane = lane
        self.reached = False

    def reach(self) -> None:
        self.reached = True

    def is_reached(self) -> bool:
        return self.reached

    def wait(self) -> None:
        self._lane.num_waits += not self.reached
        while not self.reached:
            self._lane.run_next()


class LateLane:
    """Gets on only when it is waited for, or at random: `eagerness` is how many pieces of work it does on average
    whenever it is given another. 0 is as late as a device can be."""

    device = torch.device("cpu")

    def __init__(self, seed: int = 0, eagerness: float = 0.0) -> None:
        self._rng = random.Random(seed)
        self._eagerness = eagerness
        self._work: deque[Callable[[], object]] = deque()
        self._is_working = False
        self.num_waits = 0  # for something that had not happened yet
        self.num_buffers = 0

    def host_buffer(self, num_bytes: int) -> torch.Tensor:
        self.num_buffers += not self._is_working
        return torch.full((num_bytes,), GARBAGE, dtype=torch.uint8)

    def enqueue(self, work: Callable[[], object]) -> None:
        assert not self._is_working, "work of the device hands over work"
        self._work.append(work)
        while self._work and self._rng.random() < self._eagerness / (1 + self._eagerness):
            self.run_next()

    def run_next(self) -> None:
        self._is_working = True
        try:
            self._work.popleft()()
        finally:
            self._is_working = False

    def mark(self) -> LateMark:
        mark = LateMark(self)
        self.enqueue(mark.reach)
        return mark

    def stamp(self) -> FakeStamp:
        stamp = FakeStamp()
        if self._is_working:
            stamp.take()
        else:
            self.enqueue(stamp.take)
        return stamp


class PromptLane(LateLane):
    """Raises what work raises where it is handed over, as CUDA does where memory lacks; results come late all the
    same."""

    def enqueue(self, work: Callable[[], object]) -> None:
        if isinstance(getattr(work, "__self__", None), LateMark):
            self._work.append(work)
            return
        while self._work:
            self.run_next()
        self._work.append(work)
        self.run_next()


class ThreadMark:
    def __init__(self, lane: "ThreadLane") -> None:
        self._lane = lane
        self._event = threading.Event()

    def reach(self) -> None:
        self._event.set()

    def is_reached(self) -> bool:
        return self._event.is_set()

    def wait(self) -> None:
        assert self._event.wait(timeout=60)
        if self._lane.error is not None:
            raise self._lane.error


class ThreadLane:
    """A thread that sleeps a random while before some pieces of work."""

    device = torch.device("cpu")

    def __init__(self, seed: int, longest_sleep_s: float) -> None:
        self._rng = random.Random(seed)
        self._longest_sleep_s = longest_sleep_s
        self._work: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self.error: Exception | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def __enter__(self) -> "ThreadLane":
        return self

    def __exit__(self, *_: object) -> None:
        self._work.put(None)
        self._thread.join(timeout=60)

    @torch.inference_mode()
    def _run(self) -> None:
        torch.set_num_threads(1)
        while (work := self._work.get()) is not None:
            if self._rng.random() < 0.3:
                time.sleep(self._rng.random() * self._longest_sleep_s)
            try:
                work()
            except Exception as error:
                self.error = error

    def host_buffer(self, num_bytes: int) -> torch.Tensor:
        return torch.full((num_bytes,), GARBAGE, dtype=torch.uint8)

    def enqueue(self, work: Callable[[], object]) -> None:
        self._work.put(work)

    def mark(self) -> ThreadMark:
        mark = ThreadMark(self)
        self.enqueue(mark.reach)
        return mark

    def stamp(self) -> FakeStamp:
        stamp = FakeStamp()
        if threading.current_thread() is self._thread:
            stamp.take()
        else:
            self.enqueue(stamp.take)
        return stamp


class FakeCapture:
    """Graphs that run again what was captured, over the same buffers. Their memory is one pool's, so that what one has
    returned is gone when another runs."""

    def __init__(self) -> None:
        self.num_captured = 0
        self.num_replayed = 0
        self.sizes: list[int] = []
        self._outputs: list[torch.Tensor] = []

    def __call__(self, run: Callable[[], torch.Tensor]) -> CapturedRun:
        self.num_captured += 1
        output = run().clone()
        self._outputs.append(output)

        def replay() -> None:
            self.num_replayed += 1
            self.sizes.append(len(output))
            for other in self._outputs:
                other.fill_(torch.nan)
            output.copy_(run())

        return CapturedRun(replay, output)
