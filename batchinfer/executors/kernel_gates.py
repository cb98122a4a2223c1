"""What the GPU kernels must hold to on each target, checked by compiling them without a GPU. Called by `bench kernels`
and by tests."""

import importlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import triton

from batchinfer.errors import UsageError
from batchinfer.executors.kernel_cases import MODELS, KernelCase, ModelShape, cases
from batchinfer.kernels.common.triton_ahead import ahead_of_time
from batchinfer.kernels.common.triton_inspect import Anatomy, dissect
from batchinfer.kernels.common.triton_targets import TARGETS, Target

# Faults that are none, with the reason, by kernel.
EXCEPTIONS = {
    (name, "no loads of 16 bytes"): reason
    for name, reason in {
        "pick_highest": "it reads a few numbers a row",
        "_join_draws": "it reads a few numbers a row",
        "_change": "it reads single tokens' logits",
    }.items()
}
if triton.__version__.startswith("3.6."):
    _OLD = "Triton 3.6 multiplies int8 by other instructions on sm_100"
    EXCEPTIONS |= {(name, "no UTCIMMA"): _OLD for name in ("_int8_linear", "_quantize_rows")}
_COLUMNS = f"{'registers':>9} {'spills':>6} {'shared KiB':>10} {'matrix':>6}  loads by bits"


@dataclass(frozen=True, slots=True)
class Verdict:
    """One kernel of a case on a target; `faults` is empty where it holds to all gates but those that it is excused
    from."""

    target: str
    model: str
    case: str
    anatomy: Anatomy
    faults: tuple[str, ...]
    excused: tuple[str, ...] = ()


def targets(names: Sequence[str]) -> list[Target]:
    """Raises UsageError on a name that is not in the table."""
    for name in names:
        if name not in TARGETS:
            raise UsageError(f"--target {name}: must be of {', '.join(TARGETS)}")
    return [TARGETS[name] for name in names]


def models(names: Sequence[str]) -> list[ModelShape]:
    """All without a name. Raises UsageError on a name that is not in the table."""
    known = {model.name: model for model in MODELS}
    for name in names:
        if name not in known:
            raise UsageError(f"--model {name}: must be of {', '.join(known)}")
    return [known[name] for name in names] or list(MODELS)


def verdicts(target: Target, model: ModelShape) -> Iterator[Verdict]:
    """Compiles the model's cases for the target, each when it is asked for."""
    for case in cases(model):
        if target.has_e4m3 or not case.needs_e4m3:
            yield from _check(target, model, case)


def _check(target: Target, model: ModelShape, case: KernelCase) -> Iterator[Verdict]:
    backend = importlib.import_module(f"batchinfer.kernels.{case.op}.gpu")
    with ahead_of_time(target) as launches:
        getattr(backend, case.function)(*case.arguments("meta"))
    anatomies = [dissect(kernel, target, case.matrix_kind or "H") for kernel in launches.distinct]
    lacks_matrix = bool(case.matrix_kind) and not any(anatomy.matrix_products for anatomy in anatomies)
    for anatomy in anatomies:
        found = [*_faults(anatomy, target)]
        if lacks_matrix:
            found.append(f"no {target.matrix_pattern(case.matrix_kind).replace(chr(92) + 'b', '')}")
        faults = tuple(fault for fault in found if (anatomy.name, fault) not in EXCEPTIONS)
        reasons = [(fault, EXCEPTIONS[anatomy.name, fault]) for fault in found if fault not in faults]
        excused = tuple(f"{fault}: {reason}" for fault, reason in reasons)
        yield Verdict(target.name, model.name, case.name, anatomy, faults, excused)


def _faults(anatomy: Anatomy, target: Target) -> Iterator[str]:
    if anatomy.spills:
        yield f"{anatomy.spills} spills"
    if anatomy.shared_bytes > target.shared_bytes:
        yield f"more shared memory than {target.shared_bytes >> 10} KiB"
    if max(anatomy.load_bits, default=0) < 128:
        yield "no loads of 16 bytes"
    if anatomy.load_bits.get(8):
        yield "loads of single bytes"


def table_head() -> str:
    return f"{'target':<8}{'model':<14}{'operation':<29}{'kernel':<19}{_COLUMNS}"


def table_row(verdict: Verdict) -> str:
    anatomy = verdict.anatomy
    loads = " ".join(f"{bits}:{count}" for bits, count in sorted(anatomy.load_bits.items(), reverse=True))
    outcome = "; ".join(verdict.faults) or "; ".join(("ok", *verdict.excused))
    return (
        f"{verdict.target:<8}{verdict.model:<14}{verdict.case:<29}{anatomy.name:<19}"
        f"{anatomy.registers:>9} {anatomy.spills:>6} {anatomy.shared_bytes / 1024:>10.1f} "
        f"{anatomy.matrix_products:>6}  {loads:<28} {outcome}"
    )
