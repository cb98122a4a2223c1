"""The devices that the Triton kernels are built for, and what each can do. Used by the gpu backends to choose sizes and
number formats, and by the gates that compile ahead of time."""

import functools
import os
import re
from dataclasses import dataclass

import triton
from triton.backends.compiler import GPUTarget

MATRIX_KINDS = "HQI"  # of products' operands: 16-bit floats, 8-bit ones, 8-bit integers


@dataclass(frozen=True, slots=True)
class Target:
    """One kind of device. `generation` is the key of the gpu backends' tables of sizes."""

    name: str
    generation: str
    backend: str  # Triton's name: cuda or hip
    arch: int | str  # Triton's name: 90, or gfx942
    warp_size: int
    shared_bytes: int  # most that a block of threads may have
    has_e4m3: bool  # converts the format of the cache by itself
    matrix_instruction: str  # pattern of its newest kind of 16-bit matrix product in the disassembly

    def matrix_pattern(self, kind: str = "H") -> str:
        """Of products of one of MATRIX_KINDS."""
        if self.backend == "cuda":
            return re.sub(r"H(G?MMA)", rf"{kind}\1", self.matrix_instruction)
        return self.matrix_instruction + {"H": r"f32\w*(?:f16|bf16)", "Q": r"f32\w*fp8", "I": r"i32"}[kind]

    @property
    def triton(self) -> GPUTarget:
        return GPUTarget(self.backend, self.arch, self.warp_size)


# Shared memory: CUDA C++ Programming Guide, "Technical Specifications per Compute Capability"; CDNA 3 ISA: 64 KiB.
# gfx942 has an e4m3 of its own (FNUZ, another bias), so codes are taken apart by bits there. sm_120 is Blackwell
# without what sm_100 has: its blocks share as little memory as sm_89's, and its products are those of one warp.
TARGETS = {
    target.name: target
    for target in (
        Target("sm_80", "ampere", "cuda", 80, 32, 163 << 10, False, r"\bHMMA\b"),
        Target("sm_86", "small", "cuda", 86, 32, 99 << 10, False, r"\bHMMA\b"),
        Target("sm_89", "small", "cuda", 89, 32, 99 << 10, True, r"\bHMMA\b"),
        Target("sm_90", "hopper", "cuda", 90, 32, 227 << 10, True, r"\bHGMMA\b"),
        Target("sm_100", "blackwell", "cuda", 100, 32, 227 << 10, True, r"\bUTCHMMA\b"),
        Target("sm_120", "small", "cuda", 120, 32, 99 << 10, True, r"\bHMMA\b"),
        Target("gfx942", "cdna3", "hip", "gfx942", 64, 64 << 10, False, r"\bv_mfma_"),
    )
}
# CDNA 4 has what CDNA 3 has, and more shared memory; CDNA 2 and RDNA have other matrix instructions or warps.
_AS_GFX942 = ("gfx942", "gfx950")
LEAST_CUDA = min(int(target.arch) for target in TARGETS.values() if target.backend == "cuda")
FUSED = {"enable_fp_fusion": True}  # of each launch: Triton's default turns in 3.10
INTERPRETED = TARGETS["sm_80"]  # stands in where TRITON_INTERPRET=1 runs kernels without a device


def registers(number: int) -> dict[str, int]:
    """The option of a launch that lets each thread of a CUDA device have so many: by itself ptxas may rather spill a
    few than have fewer threads at once."""
    return {"maxnreg": number} if current().backend == "cuda" else {}


def is_interpreted() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1"


def current() -> Target:
    """The target that the active device counts as. Raises RuntimeError as `nearest` does."""
    return INTERPRETED if is_interpreted() else _of_device(triton.runtime.driver.active.get_current_device())


@functools.cache
def _of_device(device: int) -> Target:
    """Numbers tell all devices of a process apart, those that need not be there included."""
    return nearest(triton.runtime.driver.active.get_current_target())


def nearest(found: GPUTarget) -> Target:
    """What a device counts as: NVIDIA's as the newest kind that is not newer, AMD's of a kind in _AS_GFX942 as gfx942.
    Raises RuntimeError, in one line, for all others."""
    if found.backend == "hip" and found.arch in _AS_GFX942:
        return TARGETS["gfx942"]
    if found.backend == "hip":
        raise RuntimeError(f"{found.arch}: of AMD's devices the GPU kernels know {' and '.join(_AS_GFX942)}")
    if found.backend != "cuda":
        raise RuntimeError(f"{found.backend} {found.arch}: the GPU kernels know devices of NVIDIA and AMD only")
    known = [target for target in TARGETS.values() if target.backend == "cuda" and int(target.arch) <= found.arch]
    if not known:
        raise RuntimeError(f"sm_{found.arch}: the GPU kernels need sm_{LEAST_CUDA} or newer")
    return max(known, key=lambda target: int(target.arch))
