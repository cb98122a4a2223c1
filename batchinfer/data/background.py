"""The two threads of the writer: one that brings finished rows to the journal in time, one that builds parts. A failure
in either is kept and raised again in the main thread; after it nothing more is done."""

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

Item = TypeVar("Item")
_HURRY_SIZE = 8 << 20  # write at once
_FULL_SIZE = 32 << 20  # let the caller wait: the device is slower than the engine


class _Thread:
    """A thread with one condition that guards all of its state."""

    def __init__(self, name: str) -> None:
        self._changed = threading.Condition()
        self._error: BaseException | None = None
        self._busy = False
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raise the failure of the thread, if there was one."""
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            while (task := self._next()) is not None:
                task()
                with self._changed:
                    self._busy = False
                    self._changed.notify_all()
        except BaseException as e:  # raised again in the main thread, whatever it is
            with self._changed:
                self._error = e
                self._changed.notify_all()

    def _next(self) -> Callable[[], None] | None:
        """Wait for work; None where the thread is to end. Sets _busy."""
        raise NotImplementedError

    def _has_work(self) -> bool:
        raise NotImplementedError

    def _wait_until_idle(self) -> None:
        with self._changed:
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._error is not None or not (self._busy or self._has_work()))
        self.check()

    def stop(self) -> None:
        """End the thread and wait for it; raises nothing, see check()."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
        self._thread.join()


class Worker(_Thread):
    """Runs tasks in the order given; stop() lets the current one end and drops the rest."""

    def __init__(self, name: str) -> None:
        self._tasks: deque[Callable[[], None]] = deque()
        super().__init__(name)

    def submit(self, task: Callable[[], None]) -> None:
        with self._changed:
            self._tasks.append(task)
            self._changed.notify_all()

    def drain(self) -> None:
        """Wait until all tasks have run; raises the thread's failure."""
        self._wait_until_idle()

    def _has_work(self) -> bool:
        return bool(self._tasks)

    def _next(self) -> Callable[[], None] | None:
        with self._changed:
            self._changed.wait_for(lambda: self._tasks or self._stopped)
            if self._stopped:
                return None
            self._busy = True
            return self._tasks.popleft()


class Flusher(_Thread, Generic[Item]):
    """Collects items and hands them to `write` together, within interval_s of the first, or sooner where they are
    many. It keeps its own time, so that a slow step of the main thread delays nothing. stop() writes what is left."""

    def __init__(self, name: str, write: Callable[[Sequence[Item]], None], interval_s: float) -> None:
        self._write = write
        self._interval_s = interval_s
        self._items: list[Item] = []
        self._size = 0
        self._due = 0.0
        self._hurry = False
        super().__init__(name)

    def add(self, items: Sequence[Item], size: int) -> None:
        """size: about how many bytes they hold. Waits where the device is too far behind; raises the thread's
        failure."""
        with self._changed:
            self._changed.wait_for(lambda: self._error is not None or self._size < _FULL_SIZE)
            self.check()
            if not self._items:
                self._due = time.monotonic() + self._interval_s
            self._items.extend(items)
            self._size += size
            self._changed.notify_all()

    def flush(self) -> None:
        """Wait until all items are written; raises the thread's failure."""
        with self._changed:
            self._hurry = True
        self._wait_until_idle()

    def _has_work(self) -> bool:
        return bool(self._items)

    def _next(self) -> Callable[[], None] | None:
        with self._changed:
            self._changed.wait_for(lambda: self._items or self._stopped)
            if not self._items:
                return None
            left = self._due - time.monotonic()
            self._changed.wait_for(self._is_urgent, timeout=max(left, 0.0))
            items, self._items = self._items, []
            self._size, self._hurry, self._busy = 0, False, True
            return lambda: self._write(items)

    def _is_urgent(self) -> bool:
        return self._hurry or self._stopped or self._size >= _HURRY_SIZE
