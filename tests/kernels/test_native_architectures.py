"""The native code of each operation compiles for machines other than this one."""

import platform
import shutil
import subprocess

import pytest
from batchinfer.kernels.common import native

CROSS_COMPILER = "aarch64-linux-gnu-g++"
FLAGS = ("-std=c++17", "-O1", "-fPIC", "-fopenmp", "-S", "-o", "/dev/null")


def compile_for(compiler: str, operation: str, *options: str) -> None:
    source = native.KERNELS / operation / "cpu.cpp"
    done = subprocess.run([compiler, *FLAGS, *options, str(source)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(shutil.which(CROSS_COMPILER) is None, reason=f"needs {CROSS_COMPILER}")
@pytest.mark.slow
@pytest.mark.parametrize("operation", native.OPERATIONS)
def test_compiles_for_aarch64(operation):
    compile_for(CROSS_COMPILER, operation)


@pytest.mark.skipif(platform.machine() != "x86_64" or shutil.which("g++") is None, reason="needs g++ for x86-64")
@pytest.mark.slow
@pytest.mark.parametrize("level", ["x86-64", "x86-64-v3", "x86-64-v4"])
@pytest.mark.parametrize("operation", native.OPERATIONS)
def test_compiles_for_each_level_of_x86_64(operation, level):
    compile_for("g++", operation, f"-march={level}")
