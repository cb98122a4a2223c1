"""How the allocator of this process treats the memory of activations on a CPU. Called by local.py."""

import ctypes
import sys

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of glibc's mallopt
_NEVER = 1 << 30  # bytes; larger tensors still get memory of their own


def keep_freed_memory() -> None:
    """From now on the memory of a freed tensor stays with the process, for the next one of its size. By default glibc
    asks the system for each larger tensor anew, whose clearing of pages took a tenth of a prefill step's time. What
    is free already, as after loading a model, is given back first. Without glibc nothing changes."""
    if not sys.platform.startswith("linux"):
        return
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt") and hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)
        libc.mallopt(_TRIM_THRESHOLD, _NEVER)
        libc.mallopt(_MMAP_THRESHOLD, _NEVER)
