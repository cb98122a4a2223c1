"""Runs the files triton_interpreted*.py under Triton's interpreter, in a process of their own."""

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

triton = pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(
    triton.__version__.startswith("3.6.") and np.lib.NumpyVersion(np.__version__) >= "2.4.0",
    reason="the interpreter of triton 3.6 takes no bound of a loop from a tensor with numpy 2.4 or newer",
)
GRID = sorted(Path(__file__).parent.glob("triton_interpreted*.py"))


def run_interpreted(*options: str) -> str:
    command = [sys.executable, "-m", "pytest", *map(str, GRID), "-q", "-o", "addopts=", *options]
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    return done.stdout


def test_kernels_equal_their_references():
    passed = re.search(r"(\d+) passed", run_interpreted("-m", "not slow"))
    assert passed
    assert int(passed[1]) > 190


@pytest.mark.slow
def test_more_shapes_of_attention_and_rows_of_sampling():
    passed = re.search(r"(\d+) passed", run_interpreted("-m", "slow"))
    assert passed
    assert int(passed[1]) >= 94
