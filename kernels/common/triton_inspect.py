"""What compiled Triton kernels are made of: registers, spills, shared memory, instructions. Used by the gates of
`bench kernels`."""

import re
import struct
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

import triton
from batchinfer.kernels.common.triton_targets import MATRIX_KINDS, Target
from triton.compiler import CompiledKernel

_CUDA_LOAD = re.compile(r"\b(?:LDG|LDGSTS)\.[\w.]*")
_CUDA_INSTRUCTION_BYTES = 16
_HIP_LOAD = re.compile(r"\b(?:global|buffer|flat)_load_(\w+)")
_HIP_WIDTHS = {"dwordx4": 128, "dwordx3": 96, "dwordx2": 64, "dword": 32}
_READ = re.compile(r"tt\.load .*: tensor<([\dx]+)x!tt\.ptr<[a-z]+(\d+)")  # in Triton's own code: shape and bits
# Of 64-bit ELF: where the table of sections is; size and number of its entries and which has the names; an entry's
# name, offset and size.
_ELF_TABLE, _ELF_COUNTS, _ELF_SECTION = struct.Struct("<40xQ"), struct.Struct("<58xHHH"), struct.Struct("<I20xQQ")


@dataclass(frozen=True, slots=True)
class Anatomy:
    """One kernel on one target."""

    name: str
    registers: int  # a thread
    spills: int  # instructions that move registers to memory and back (cuda), or registers that were moved (hip)
    shared_bytes: int
    matrix_products: dict[str, int]  # instructions of the target's newest kind, by the kind of their operands
    load_bits: dict[int, int]  # global loads by width
    read_bytes: float  # a thread's share of the largest block that the kernel loads at once


_known: dict[str, Anatomy] = {}  # by Triton's hash of source, sizes, options and target


def dissect(kernels: Sequence[CompiledKernel], target: Target) -> list[Anatomy]:
    """Reads the kernels' machine code, for cuda with the disassembler that Triton brings. A kernel is read once in a
    process, and all of a call together, as a disassembler takes longer to start than to read many."""
    new = list({kernel.hash: kernel for kernel in kernels if kernel.hash not in _known}.values())
    read = _dissect_cuda if target.backend == "cuda" else _dissect_hip
    _known.update(zip((kernel.hash for kernel in new), read(new, target), strict=True))
    return [_known[kernel.hash] for kernel in kernels]


def _dissect_cuda(kernels: Sequence[CompiledKernel], target: Target) -> Iterator[Anatomy]:
    for kernel, sass in zip(kernels, _disassembled([kernel.asm["cubin"] for kernel in kernels], target), strict=True):
        usage = _tool("cuobjdump", kernel.asm["cubin"], "--dump-resource-usage")
        yield Anatomy(
            name=kernel.name,
            registers=max(int(n) for n in re.findall(r"REG:(\d+)", usage)),
            spills=len(re.findall(r"\b(?:STL|LDL)\b", sass)),
            shared_bytes=kernel.metadata.shared,
            matrix_products=_products(sass, target),
            load_bits=dict(Counter(map(_cuda_width, _CUDA_LOAD.findall(sass)))),
            read_bytes=_read_bytes(kernel),
        )


def _disassembled(binaries: Sequence[bytes], target: Target) -> Iterator[str]:
    """The instructions of each cubin, one a line."""
    codes = [_machine_code(binary) for binary in binaries]
    arch = f"SM{target.arch}{'a' if int(target.arch) >= 90 else ''}"  # as Triton compiles
    lines = _tool("nvdisasm", b"".join(codes), "--binary", arch).splitlines() if codes else []
    instructions = [line for line in lines if line.lstrip().startswith("/*")]
    for code in codes:
        count = len(code) // _CUDA_INSTRUCTION_BYTES
        yield "\n".join(instructions[:count])
        del instructions[:count]
    if instructions:
        raise RuntimeError(f"nvdisasm shows {len(instructions)} instructions more than {arch} code has")


def _machine_code(cubin: bytes) -> bytes:
    """The sections of an ELF file that hold instructions."""
    (table,) = _ELF_TABLE.unpack_from(cubin)
    size, number, names_at = _ELF_COUNTS.unpack_from(cubin)
    sections = [_ELF_SECTION.unpack_from(cubin, table + place * size) for place in range(number)]
    names = sections[names_at][1]
    return b"".join(
        cubin[start : start + length] for name, start, length in sections if cubin.startswith(b".text.", names + name)
    )


def _tool(name: str, binary: bytes, *options: str) -> str:
    """What a tool of CUDA says of a binary."""
    with tempfile.NamedTemporaryFile() as file:
        file.write(binary)
        file.flush()
        command = [str(Path(triton.backends.__path__[0]) / "nvidia" / "bin" / name), *options, file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def _cuda_width(load: str) -> int:
    """Of LDG.E.128, LDG.E.U8.CONSTANT, LDGSTS.E.BYPASS.128, ...: 32 bits where it names no width."""
    parts = load.split(".")
    widths = {"256": 256, "128": 128, "64": 64, "U16": 16, "S16": 16, "U8": 8, "S8": 8}
    return next((bits for name, bits in widths.items() if name in parts), 32)


def _dissect_hip(kernels: Sequence[CompiledKernel], target: Target) -> Iterator[Anatomy]:
    for kernel in kernels:
        code = kernel.asm["amdgcn"]
        yield Anatomy(
            name=kernel.name,
            registers=_hip_entry(code, "vgpr_count"),
            spills=_hip_entry(code, "vgpr_spill_count"),  # scalar registers go to lanes of vector ones, not to memory
            shared_bytes=kernel.metadata.shared,
            matrix_products=_products(code, target),
            load_bits=dict(Counter(map(_hip_width, _HIP_LOAD.findall(code)))),
            read_bytes=_read_bytes(kernel),
        )


def _hip_entry(code: str, name: str) -> int:
    return sum(int(n) for n in re.findall(rf"\.{name}:\s+(\d+)", code))


def _hip_width(load: str) -> int:
    return _HIP_WIDTHS.get(load, 16 if "short" in load else 8)


def _products(code: str, target: Target) -> dict[str, int]:
    return {kind: len(re.findall(target.matrix_pattern(kind), code)) for kind in MATRIX_KINDS}


def _read_bytes(kernel: CompiledKernel) -> float:
    threads = kernel.metadata.num_warps * kernel.metadata.target.warp_size
    blocks = [prod(map(int, shape.split("x"))) * int(bits) / 8 for shape, bits in _READ.findall(kernel.asm["ttir"])]
    return max(blocks, default=0.0) / threads
