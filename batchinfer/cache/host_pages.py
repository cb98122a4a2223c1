"""A CPU's memory for keys and values: huge pages, of which those that a job will need can be asked of the system while
its weights are still being loaded. paged_kv makes tensors of it."""

import ctypes
import mmap
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from itertools import accumulate

from batchinfer.cache.spec import ELEMENT_BYTES, KVCacheSpec

_HUGE_PAGE = 2 << 20
_CACHE_LINE = 64


@dataclass(frozen=True, slots=True)
class BlockForm:
    """One block's keys and values of all layers, side by side: blocks are used from the first on, and so memory is
    taken for those alone, to a page. Were each layer's blocks together, each layer would begin a huge page of its own.

    offsets: of keys and values of each layer in turn, each at a cache line. num_bytes: from a block to the next.
    """

    offsets: tuple[int, ...]
    num_bytes: int

    @classmethod
    def of(cls, spec: KVCacheSpec) -> "BlockForm":
        tokens = spec.num_kv_heads * spec.block_size * spec.head_dim
        sizes = [tokens * ELEMENT_BYTES[spec.layer_dtype(layer)] for layer in range(spec.num_layers) for _ in range(2)]
        *offsets, end = accumulate((-(-size // _CACHE_LINE) * _CACHE_LINE for size in sizes), initial=0)
        return cls(tuple(offsets), end)


class HostPages:
    """Room for the keys and values of up to most_blocks blocks: addresses alone, to which the system gives memory as
    they are first written, or as they are asked for.

    A page's first write takes microseconds, on virtual machines many: the system clears it, and the host may have to
    find it first. A job that knows how much of its cache it will fill spares its steps that.
    """

    def __init__(self, spec: KVCacheSpec, most_blocks: int) -> None:
        self.most_blocks = most_blocks
        self._form = BlockForm.of(spec)
        self._memory = huge_pages(self._form.num_bytes * most_blocks)
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._is_counted = self._is_stopped = False

    def memory(self, spec: KVCacheSpec, num_blocks: int) -> mmap.mmap | None:
        """With room for num_blocks of its blocks or more; None where these pages were reserved for fewer, or others."""
        return self._memory if BlockForm.of(spec) == self._form and num_blocks <= self.most_blocks else None

    def ask_for(self, num_blocks: Callable[[], int]) -> None:
        """Has a thread fill the first num_blocks() blocks with zeros, which it calls too. Whatever fails there only
        leaves the pages to their first writes."""
        self._thread = threading.Thread(target=self._ask, args=(num_blocks,), name="kv-pages", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Until the thread has written what it was to write: before that nobody else may. Where much is left, the wait
        is shorter than what the steps would spend on it, which hold up every processor. What is not counted by now is
        left to first writes."""
        with self._lock:
            if not self._is_counted:
                self._is_stopped = True
                return
        if self._thread is not None:
            self._thread.join()

    def stop(self) -> None:
        """The pages are not needed: the thread ends soon."""
        with self._lock:
            self._is_stopped = True

    def _ask(self, num_blocks: Callable[[], int]) -> None:
        with suppress(Exception):  # whoever reads the rows in earnest says what is wrong with them
            num_bytes = min(num_blocks(), self.most_blocks) * self._form.num_bytes
            with self._lock:
                self._is_counted = True
            view = ctypes.c_char.from_buffer(self._memory)  # keeps the memory mapped
            for first in range(0, num_bytes, _HUGE_PAGE):
                if self._is_stopped:
                    return
                ctypes.memset(ctypes.addressof(view) + first, 0, min(_HUGE_PAGE, num_bytes - first))


def huge_pages(num_bytes: int) -> mmap.mmap:
    """Memory of zeros, in huge pages where the system has them: a sequence's blocks lie far apart, and with small pages
    each step would look up thousands of addresses anew."""
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without them
            memory.madvise(mmap.MADV_HUGEPAGE)
    return memory
