"""What the GPU kernels must hold to on each target, checked by compiling them without a GPU. Called by `bench kernels`
and by tests."""

import importlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context

import triton
from triton.compiler import CompiledKernel

from batchinfer.errors import UsageError
from batchinfer.executors.kernel_cases import KernelCase, ModelShape, cases
from batchinfer.executors.local import usable_processors
from batchinfer.kernels.common.triton_ahead import ahead_of_time
from batchinfer.kernels.common.triton_inspect import Anatomy, dissect
from batchinfer.kernels.common.triton_targets import TARGETS, Target

_VECTOR_BYTES = 16  # that a thread should load at once, where the kernel's largest block has as many for it
# Faults that are none, with the reason, by kernel.
EXCEPTIONS: dict[tuple[str, str], str] = {}
if triton.__version__.startswith("3.6."):
    _OLD = "Triton 3.6 multiplies int8 by other instructions on sm_100"
    EXCEPTIONS = {(name, "no UTCIMMA"): _OLD for name in ("_int8_linear", "_quantize_rows")}
_COLUMNS = f"{'registers':>9} {'spills':>6} {'shared KiB':>10} {'matrix':>6}  loads by bits"


@dataclass(frozen=True, slots=True)
class Verdict:
    """One kernel of a case on a target; `faults` is empty where it holds to all gates but those that `notes` tell why
    it need not."""

    target: str
    model: str
    case: str
    anatomy: Anatomy
    faults: tuple[str, ...]
    notes: tuple[str, ...] = ()
    matrix_kind: str = "H"  # of the products that are counted


def targets(names: Sequence[str]) -> list[Target]:
    """Raises UsageError on a name that is not in the table."""
    for name in names:
        if name not in TARGETS:
            raise UsageError(f"--target {name}: must be of {', '.join(TARGETS)}")
    return [TARGETS[name] for name in names]


def all_verdicts(targets: Sequence[Target], models: Sequence[ModelShape]) -> Iterator[Verdict]:
    """The verdicts of each target and model, in that order, by a process for each processor: of targets, as the models
    of one share kernels."""
    workers = min(len(targets), usable_processors())
    if workers < 2:
        for target in targets:
            yield from _of_target(target, models)
        return
    with ProcessPoolExecutor(workers, get_context("spawn")) as pool:
        for found in [pool.submit(_of_target, target, models) for target in targets]:
            yield from found.result()


def _of_target(target: Target, models: Sequence[ModelShape]) -> list[Verdict]:
    return [verdict for model in models for verdict in verdicts(target, model)]


def verdicts(target: Target, model: ModelShape) -> list[Verdict]:
    """Compiles the model's cases for the target. What other cases or models had compiled for it in this process, or
    what Triton keeps in its cache by all that the code depends on, is not compiled again."""
    chosen = [case for case in cases(model) if target.has_e4m3 or not case.needs_e4m3]
    launched = [_launched(target, case) for case in chosen]
    anatomies = iter(dissect([kernel for kernels in launched for kernel in kernels], target))
    found: list[Verdict] = []
    for case, kernels in zip(chosen, launched, strict=True):
        found += _judge(target, model, case, [next(anatomies) for _ in kernels])
    return found


def _launched(target: Target, case: KernelCase) -> list[CompiledKernel]:
    backend = importlib.import_module(f"batchinfer.kernels.{case.op}.gpu")
    with ahead_of_time(target) as launches:
        getattr(backend, case.function)(*case.arguments("meta"))
    return launches.distinct


def _judge(target: Target, model: ModelShape, case: KernelCase, anatomies: Sequence[Anatomy]) -> Iterator[Verdict]:
    kind = case.matrix_kind
    lacks_matrix = bool(kind) and not any(anatomy.matrix_products[kind] for anatomy in anatomies)
    for anatomy in anatomies:
        found = [*_faults(anatomy, target)]
        if lacks_matrix:
            found.append(f"no {target.matrix_pattern(kind).replace(chr(92) + 'b', '')}")
        faults = tuple(fault for fault in found if (anatomy.name, fault) not in EXCEPTIONS)
        reasons = [(fault, EXCEPTIONS[anatomy.name, fault]) for fault in found if fault not in faults]
        notes = tuple(f"{fault}: {reason}" for fault, reason in reasons) + tuple(_notes(anatomy))
        yield Verdict(target.name, model.name, case.name, anatomy, faults, notes, kind or "H")


def _faults(anatomy: Anatomy, target: Target) -> Iterator[str]:
    if anatomy.spills:
        yield f"{anatomy.spills} spills"
    if anatomy.shared_bytes > target.shared_bytes:
        yield f"more shared memory than {target.shared_bytes >> 10} KiB"
    if _lacks_vectors(anatomy) and anatomy.read_bytes >= _VECTOR_BYTES:
        yield f"no loads of {_VECTOR_BYTES} bytes"
    if anatomy.load_bits.get(8):
        yield "loads of single bytes"


def _notes(anatomy: Anatomy) -> Iterator[str]:
    if _lacks_vectors(anatomy) and anatomy.read_bytes < _VECTOR_BYTES:
        yield f"no loads of {_VECTOR_BYTES} bytes: a thread reads at most {anatomy.read_bytes:g} at once"


def _lacks_vectors(anatomy: Anatomy) -> bool:
    return max(anatomy.load_bits, default=0) < 8 * _VECTOR_BYTES


def table_head() -> str:
    return f"{'target':<8}{'model':<14}{'operation':<29}{'kernel':<19}{_COLUMNS}"


def table_row(verdict: Verdict) -> str:
    anatomy = verdict.anatomy
    loads = " ".join(f"{bits}:{count}" for bits, count in sorted(anatomy.load_bits.items(), reverse=True))
    outcome = "; ".join(verdict.faults) or "; ".join(("ok", *verdict.notes))
    return (
        f"{verdict.target:<8}{verdict.model:<14}{verdict.case:<29}{anatomy.name:<19}"
        f"{anatomy.registers:>9} {anatomy.spills:>6} {anatomy.shared_bytes / 1024:>10.1f} "
        f"{anatomy.matrix_products[verdict.matrix_kind]:>6}  {loads:<28} {outcome}"
    )
