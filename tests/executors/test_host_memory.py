"""The memory of freed tensors stays with the process, counted by what is resident before and after."""

import subprocess
import sys

import pytest

_PROGRAM = """
import sys
import torch
from batchinfer.executors.host_memory import keep_freed_memory
def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096
torch.set_num_threads(1)
if sys.argv[1] == "keep":
    keep_freed_memory()
tensors = [torch.empty(400_000).fill_(1) for _ in range(60)]
before = resident()
del tensors
print(before - resident())
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="what glibc does")
def test_memory_of_freed_tensors_stays():
    given_back = {}
    for mode in ("default", "keep"):
        done = subprocess.run([sys.executable, "-c", _PROGRAM, mode], capture_output=True, text=True, check=True)
        given_back[mode] = int(done.stdout)
    assert given_back["default"] > 80_000_000  # of 96 MB
    assert given_back["keep"] < 5_000_000
