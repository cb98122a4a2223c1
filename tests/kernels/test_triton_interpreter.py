"""Runs triton_interpreted.py under Triton's interpreter, in a process of its own."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
GRID = Path(__file__).with_name("triton_interpreted.py")


def run_interpreted(*options: str) -> str:
    command = [sys.executable, "-m", "pytest", str(GRID), "-q", "-p", "no:cacheprovider", *options]
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    return done.stdout


def test_kernels_equal_their_references():
    passed = re.search(r"(\d+) passed", run_interpreted())
    assert passed
    assert int(passed[1]) > 80
