"""Freed memory of tensors stays with the process and is used again: counted by the page faults it saves."""

import subprocess
import sys

import pytest

_PROGRAM = """
import resource, sys
from batchinfer.executors.host_memory import keep_freed_memory
import torch
torch.set_num_threads(1)
if sys.argv[1] == "keep":
    keep_freed_memory()
def fill(count):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(count):
        tensors = [torch.empty(size).fill_(1) for size in (400_000, 4_000_000) for _ in range(6)]
        del tensors
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
fill(10)
print(fill(10))
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="what glibc does")
def test_memory_of_freed_tensors_is_used_again():
    faults = {}
    for mode in ("default", "keep"):
        done = subprocess.run([sys.executable, "-c", _PROGRAM, mode], capture_output=True, text=True, check=True)
        faults[mode] = int(done.stdout)
    pages = 10 * 6 * (1_600_000 + 16_000_000) // 4096
    assert faults["default"] > 0.2 * pages  # what lies at the end of the heap is given back and asked for again
    assert faults["keep"] < 0.01 * pages
