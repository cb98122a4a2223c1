"""Builds the operations' native code for this machine's CPU, once, and loads it; or loads what was built ahead, for
kinds of CPUs. Called by each operation's cpu.py on first use, and before that by `prepare`, `build`, `build_ahead`."""

import ctypes
import functools
import hashlib
import logging
import os
import platform
import re
import shlex
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from batchinfer.kernels.common.targets import cpu_lines, fitting_targets, targets_of_architecture

KERNELS = Path(__file__).resolve().parents[1]
OPERATIONS = (
    "gated_activation",
    "kv_store",
    "layer_norm",
    "paged_attention",
    "quantized_linear",
    "rms_norm",
    "rotary",
    "sampling",
)
# As DType in native.h.
FORMATS = {
    torch.float32: 0,
    torch.bfloat16: 1,
    torch.float16: 2,
    torch.float8_e4m3fn: 3,
    torch.float8_e5m2: 4,
    torch.int8: 5,
}
ACTIVATION_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_INCLUDE = re.compile(r'^#include "([^"]+)"', re.MULTILINE)
_FLAGS = ("-O3", "-std=c++17", "-shared", "-fPIC")
# The first that the compiler takes: not each knows the machine by name, and not each brings an OpenMP.
_VARIANTS = (("-march=native", "-fopenmp"), ("-mcpu=native", "-fopenmp"), ("-fopenmp",), ())

_log = logging.getLogger(__name__)
_lock = threading.Lock()
_CARRIED = "prebuilt"  # folder beside the operations that a wheel may bring
_built: list[Mapping[str, Path] | None] = []  # the libraries, once they are known; None where there are none


class NativeBuildError(Exception):
    """The native code cannot be had; the message is one line that says why."""


def can_run(operation: str, *activations: torch.Tensor) -> bool:
    """Whether the native code takes an operation with these activations: all on the CPU, of one float dtype. Builds the
    code where no earlier process did; where this machine cannot build it, that is said once and the answer is no."""
    dtype = activations[0].dtype
    for tensor in activations:  # no generator: it is asked before each operation of each layer
        if not tensor.is_cpu or tensor.dtype != dtype:
            return False
    return dtype in ACTIVATION_DTYPES and _library(operation) is not None


def function(operation: str, name: str, *argtypes: type) -> Callable[..., None]:
    """The C function `name` of an operation that can run."""
    entry = getattr(_library(operation), name)
    entry.argtypes = argtypes
    entry.restype = None
    return entry


def dense(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The tensor itself where it is dense and of the dtype, else such a copy."""
    return tensor if tensor.dtype == dtype and tensor.is_contiguous() else tensor.to(dtype).contiguous()


def dense_rows(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself where its last dimension is dense, else a dense copy."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def address(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def build(report: Callable[[str], None]) -> Path:
    """Compiles what is missing; `report` is told in one line before that. Returns the directory of the libraries.
    Raises NativeBuildError."""
    return next(iter(_build(report).values())).parent


def build_ahead(report: Callable[[str], None], output: Path) -> Path:
    """Compiles for every kind of CPU of this machine's architecture, each into a folder of `output`, which
    BATCHINFER_KERNELS then names on other machines, or which lies in the package as kernels/prebuilt. Libraries of
    other sources that lie there stay, unused. Returns `output`, absolute. Raises NativeBuildError."""
    output = output.expanduser().absolute()
    compiler = _find_compiler()
    targets = targets_of_architecture()
    if not targets:
        raise NativeBuildError(f"no kind of CPU is known for {platform.machine()}; its kernels are built at first use")
    try:
        for target in targets:
            variants = ((*target.options, "-fopenmp"), target.options)
            _compile_missing(compiler, _libraries(output / target.name), variants, target.name, report)
    except OSError as error:
        raise NativeBuildError(f"{output} cannot be written: {error}") from error
    return output


def prepare(report: Callable[[str], None]) -> Mapping[str, Path] | None:
    """Each operation's library, where no operation has asked for them yet: built ahead, else by `build`. None, and a
    line that says why, where that fails."""
    with _lock:
        if not _built:
            try:
                _built.append(_built_ahead(report) or _build(report))
            except NativeBuildError as error:
                report(f"the CPU kernels run in plain torch, which is slower: {error}")
                _built.append(None)
    return _built[0]


def _build(report: Callable[[str], None]) -> Mapping[str, Path]:
    compiler = _find_compiler()
    directory = _cache_directory() / "native" / _machine_fingerprint(compiler)
    libraries = _libraries(directory)
    try:
        _compile_missing(compiler, libraries, _VARIANTS, "this machine", report)
    except OSError as error:
        raise NativeBuildError(f"{directory} cannot be written: {error}; set BATCHINFER_CACHE") from error
    return libraries


def _built_ahead(report: Callable[[str], None]) -> Mapping[str, Path] | None:
    """Of the fastest kind of CPU that this one is, of these very sources."""
    named = os.environ.get("BATCHINFER_KERNELS")
    for directory in ([Path(named).expanduser().absolute()] if named else []) + [KERNELS / _CARRIED]:
        for target in fitting_targets():
            libraries = _libraries(directory / target.name)
            if all(path.is_file() for path in libraries.values()):
                return libraries
    if named:
        report(f"BATCHINFER_KERNELS={named} has no CPU kernels of this version for this CPU: they are compiled")
    return None


def _libraries(directory: Path) -> Mapping[str, Path]:
    return {name: _library_path(directory, name) for name in OPERATIONS}


@functools.cache
def _library(operation: str) -> ctypes.CDLL | None:
    libraries = prepare(_log.warning)
    # torch was imported, so its OpenMP runtime is loaded and the library, asking for the same name, shares its threads
    if libraries is None:
        return None
    try:
        return ctypes.CDLL(str(libraries[operation]))
    except OSError as error:  # built ahead for another C library
        _log.warning("the CPU kernel %s does not load, plain torch runs instead: %s", operation, error)
        return None


def _find_compiler() -> list[str]:
    if chosen := shlex.split(os.environ.get("CXX", "")):
        return chosen
    for name in ("c++", "g++", "clang++"):
        if found := shutil.which(name):
            return [found]
    raise NativeBuildError("there is no C++ compiler (c++, g++ or clang++, or CXX)")


def _cache_directory() -> Path:
    """Where the models' cache is, too."""
    if own := os.environ.get("BATCHINFER_CACHE"):
        return Path(own).expanduser().absolute()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache").expanduser().absolute() / "batchinfer"


def _machine_fingerprint(compiler: list[str]) -> str:
    """Of all but the sources that decides what the compiler makes."""
    return _fingerprint(*compiler, _run([*compiler, "--version"]), *_FLAGS, *map(str, _VARIANTS), _cpu())


def _library_path(directory: Path, operation: str) -> Path:
    """Named by what the operation is made of: an edited source asks for a new library, and only for its own."""
    sources = _with_includes(KERNELS / operation / "cpu.cpp", [])
    parts = [part for path in sources for part in (str(path.relative_to(KERNELS)), path.read_text(encoding="utf-8"))]
    return directory / f"{operation}-{_fingerprint(str(len(sources)), *parts)}.so"


def _with_includes(source: Path, found: list[Path]) -> list[Path]:
    """`found`, with the source and each file that it includes by a quoted name."""
    if source not in found:
        found.append(source)
        for name in _INCLUDE.findall(source.read_text(encoding="utf-8")):
            _with_includes((source.parent / name).resolve(), found)
    return found


def _fingerprint(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def _cpu() -> str:
    """The machine's architecture and instruction sets."""
    return f"{platform.machine()}\n{cpu_lines(('model name', 'flags', 'Features', 'CPU part'))}"


def _compile_missing(
    compiler: list[str],
    libraries: Mapping[str, Path],
    variants: Sequence[tuple[str, ...]],
    purpose: str,
    report: Callable[[str], None],
) -> None:
    """libraries: of one directory. variants: further options, of which the first that the compiler takes are used."""
    missing = {name: path for name, path in libraries.items() if not path.is_file()}
    if missing:
        directory = next(iter(missing.values())).parent
        report(f"compiling the CPU kernels for {purpose} with {compiler[0]}, once: {directory}")
        _compile(compiler, missing, directory, variants)


def _compile(
    compiler: list[str], libraries: Mapping[str, Path], directory: Path, variants: Sequence[tuple[str, ...]]
) -> None:
    """All at once, one process each, into a directory of its own; whole libraries then take their names."""
    directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=directory) as partial:
        flags = [*_FLAGS, *_accepted_variant(compiler, Path(partial), variants)]
        outputs = {name: Path(partial) / f"{name}.so" for name in libraries}
        jobs = [
            subprocess.Popen(
                [*compiler, *flags, "-o", str(output), str(KERNELS / name / "cpu.cpp")],
                stderr=subprocess.PIPE,
                text=True,
            )
            for name, output in outputs.items()
        ]
        errors = [job.communicate()[1] for job in jobs]
        for job, error in zip(jobs, errors, strict=True):
            if job.returncode:
                raise NativeBuildError(f"{compiler[0]} failed: {_first_error(error)}")
        for name, output in outputs.items():
            os.replace(output, libraries[name])


def _accepted_variant(compiler: list[str], scratch: Path, variants: Sequence[tuple[str, ...]]) -> tuple[str, ...]:
    source = scratch / "probe.cpp"
    source.write_text("int main() { return 0; }\n")
    error = ""
    for variant in variants:
        command = [*compiler, *_FLAGS, *variant, "-o", str(scratch / "probe.so"), str(source)]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        if result.returncode == 0:
            return variant
        error = result.stderr
    raise NativeBuildError(f"{compiler[0]} does not work: {_first_error(error)}")


def _first_error(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return next((line for line in lines if "error" in line), lines[0] if lines else "no message")


def _run(command: list[str]) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        raise NativeBuildError(f"{command[0]} does not run: {error}") from error
