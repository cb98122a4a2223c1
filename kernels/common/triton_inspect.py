"""What a compiled Triton kernel is made of: registers, spills, shared memory, instructions. Used by the gates of
`bench kernels`."""

import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

import triton
from batchinfer.kernels.common.triton_targets import Target
from triton.compiler import CompiledKernel

_CUDA_LOAD = re.compile(r"\b(?:LDG|LDGSTS)\.[\w.]*")
_HIP_LOAD = re.compile(r"\b(?:global|buffer|flat)_load_(\w+)")
_HIP_WIDTHS = {"dwordx4": 128, "dwordx3": 96, "dwordx2": 64, "dword": 32}


@dataclass(frozen=True, slots=True)
class Anatomy:
    """One kernel on one target."""

    name: str
    registers: int  # a thread
    spills: int  # instructions that move registers to memory and back (cuda), or registers that were moved (hip)
    shared_bytes: int
    matrix_products: int  # instructions of the target's newest kind for the operands asked for
    load_bits: dict[int, int]  # global loads by width


def dissect(kernel: CompiledKernel, target: Target, matrix_kind: str = "H") -> Anatomy:
    """Reads the machine code, for cuda with the disassembler that Triton brings. matrix_kind: as matrix_pattern's."""
    read = _dissect_cuda if target.backend == "cuda" else _dissect_hip
    return read(kernel, target.matrix_pattern(matrix_kind))


def _dissect_cuda(kernel: CompiledKernel, matrix_pattern: str) -> Anatomy:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        usage, sass = (_cuobjdump(option, file.name) for option in ("--dump-resource-usage", "--dump-sass"))
    loads: dict[int, int] = {}
    for load in _CUDA_LOAD.findall(sass):
        loads[_cuda_width(load)] = loads.get(_cuda_width(load), 0) + 1
    return Anatomy(
        name=kernel.name,
        registers=max(int(n) for n in re.findall(r"REG:(\d+)", usage)),
        spills=len(re.findall(r"\b(?:STL|LDL)\b", sass)),
        shared_bytes=kernel.metadata.shared,
        matrix_products=len(re.findall(matrix_pattern, sass)),
        load_bits=loads,
    )


def _cuobjdump(option: str, path: str) -> str:
    tool = Path(triton.backends.__path__[0]) / "nvidia" / "bin" / "cuobjdump"
    return subprocess.run([str(tool), option, path], capture_output=True, text=True, check=True).stdout


def _cuda_width(load: str) -> int:
    """Of LDG.E.128, LDG.E.U8.CONSTANT, LDGSTS.E.BYPASS.128, ...: 32 bits where it names no width."""
    parts = load.split(".")
    widths = {"256": 256, "128": 128, "64": 64, "U16": 16, "S16": 16, "U8": 8, "S8": 8}
    return next((bits for name, bits in widths.items() if name in parts), 32)


def _dissect_hip(kernel: CompiledKernel, matrix_pattern: str) -> Anatomy:
    code = kernel.asm["amdgcn"]
    loads: dict[int, int] = {}
    for width in _HIP_LOAD.findall(code):
        bits = _HIP_WIDTHS.get(width, 16 if "short" in width else 8)
        loads[bits] = loads.get(bits, 0) + 1

    def entry(name: str) -> int:
        return sum(int(n) for n in re.findall(rf"\.{name}:\s+(\d+)", code))

    return Anatomy(
        name=kernel.name,
        registers=entry("vgpr_count"),
        spills=entry("vgpr_spill_count"),  # scalar registers go to lanes of vector ones, not to memory
        shared_bytes=kernel.metadata.shared,
        matrix_products=len(re.findall(matrix_pattern, code)),
        load_bits=loads,
    )
