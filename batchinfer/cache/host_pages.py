"""A CPU's memory for keys and values: huge pages, of which those that a job will need can be asked of the system while
its weights are still being loaded. paged_kv makes tensors of it."""

import ctypes
import mmap
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress

from batchinfer.cache.spec import ELEMENT_BYTES, KVCacheSpec

_HUGE_PAGE = 2 << 20


class HostPages:
    """Room for the keys and the values of each layer of up to most_blocks blocks: addresses alone, to which the system
    gives memory as they are first written, or as they are asked for.

    A page's first write takes microseconds, on virtual machines many: the system clears it, and the host may have to
    find it first. A job that knows how much of its cache it will fill spares its steps that.
    """

    def __init__(self, spec: KVCacheSpec, most_blocks: int) -> None:
        self.most_blocks = most_blocks
        self._block_bytes = [size for layer in range(spec.num_layers) for size in [block_bytes(spec, layer)] * 2]
        self._maps = [huge_pages(size * most_blocks) for size in self._block_bytes]
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._is_counted = self._is_stopped = False

    def memory(self, spec: KVCacheSpec, num_blocks: int) -> Sequence[mmap.mmap] | None:
        """Keys and values of each layer in turn, with room for num_blocks of its blocks or more; None where these
        pages were reserved for fewer or smaller ones."""
        sizes = [size for layer in range(spec.num_layers) for size in [block_bytes(spec, layer)] * 2]
        return self._maps if sizes == self._block_bytes and num_blocks <= self.most_blocks else None

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
            blocks = min(num_blocks(), self.most_blocks)
            with self._lock:
                self._is_counted = True
            step = max(1, _HUGE_PAGE // max(self._block_bytes))
            for first in range(0, blocks, step):
                for memory, size in zip(self._maps, self._block_bytes, strict=True):
                    if self._is_stopped:
                        return
                    view = ctypes.c_char.from_buffer(memory)  # keeps the memory mapped
                    ctypes.memset(ctypes.addressof(view) + first * size, 0, min(step, blocks - first) * size)


def block_bytes(spec: KVCacheSpec, layer: int) -> int:
    """Bytes of a block's keys, or of its values, in a layer."""
    return spec.num_kv_heads * spec.block_size * spec.head_dim * ELEMENT_BYTES[spec.layer_dtype(layer)]


def huge_pages(num_bytes: int) -> mmap.mmap:
    """Memory of zeros, in huge pages where the system has them: a sequence's blocks lie far apart, and with small pages
    each step would look up thousands of addresses anew."""
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without them
            memory.madvise(mmap.MADV_HUGEPAGE)
    return memory
