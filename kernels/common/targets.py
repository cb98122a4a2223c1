"""Kinds of CPUs that native code is compiled for ahead of time, to run on machines without a compiler. Used by the
native build, which otherwise compiles for the machine it runs on."""

import platform
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Target:
    """machine: as platform.machine(); cpu_flags: what a CPU must have, as /proc/cpuinfo names it; options: what makes a
    compiler use that and nothing beyond."""

    name: str
    machine: str
    cpu_flags: frozenset[str]
    options: tuple[str, ...]


_V3 = frozenset(("avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe"))
_V4 = _V3 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
# The fastest first.
TARGETS = (
    Target(
        "x86-64-v4-bf16",
        "x86_64",
        _V4 | {"avx512_vnni", "avx512_bf16", "avx512_vbmi"},
        ("-march=x86-64-v4", "-mavx512vnni", "-mavx512bf16", "-mavx512vbmi"),
    ),
    Target("x86-64-v4", "x86_64", _V4, ("-march=x86-64-v4",)),
    Target("x86-64-v3", "x86_64", _V3, ("-march=x86-64-v3",)),
    Target("x86-64", "x86_64", frozenset(), ("-march=x86-64",)),
    Target("aarch64", "aarch64", frozenset(), ("-march=armv8-a",)),
)


def targets_of_architecture() -> list[Target]:
    """Those that a compiler of this machine can make."""
    return [target for target in TARGETS if target.machine == platform.machine()]


def fitting_targets() -> list[Target]:
    """Those whose code this machine runs."""
    flags = set(cpu_lines(("flags",)).split())
    return [target for target in targets_of_architecture() if target.cpu_flags <= flags]


def cpu_lines(wanted: tuple[str, ...]) -> str:
    """The distinct lines of /proc/cpuinfo that start so, sorted; empty where there is no such file."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    return "\n".join(sorted({line for line in lines if line.startswith(wanted)}))
