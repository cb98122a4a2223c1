"""Runs the GPU kernels on a device: right against their references, and how near to what the device can do. Called by
device_part.py."""

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from batchinfer.executors.aims import COPY, LIBRARY, aim_of, verdict
from batchinfer.executors.kernel_cases import KernelCase, ModelShape, cases

_REPEATS = 20
_FLUSHES = 8  # half a millisecond
_COPY_BYTES = 1 << 30
_MATRIX = 8192
_TOLERANCE = 2e-2  # of the largest magnitude: bf16 results of sums in another order


@dataclass(frozen=True, slots=True)
class Ceilings:
    """What a device reaches: copying, each byte read and written, and multiplying large matrices in bf16."""

    bytes_per_s: float
    flops_per_s: float

    def to_json(self) -> dict[str, float]:
        return asdict(self)

    def line(self) -> str:
        return f"copy {self.bytes_per_s / 1e12:.2f} TB/s, matrix product {self.flops_per_s / 1e12:.0f} TFLOP/s (bf16)"


def ready(device: str) -> bool:
    return torch.device(device).type == "cuda" and torch.cuda.is_available()


def device_cases(models: Sequence[ModelShape]) -> list[tuple[ModelShape, KernelCase]]:
    """All that the device can run, a model after the other."""
    from batchinfer.kernels.common.triton_targets import current  # here, as it brings Triton

    has_e4m3 = current().has_e4m3
    return [(model, case) for model in models for case in cases(model) if has_e4m3 or not case.needs_e4m3]


def measure_ceilings(device: str) -> Ceilings:
    source = torch.zeros(_COPY_BYTES, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    a, b = (torch.randn(_MATRIX, _MATRIX, device=device).to(torch.bfloat16) for _ in range(2))
    copy_s, product_s = _seconds(lambda: target.copy_(source)), _seconds(lambda: a @ b)
    return Ceilings(2 * _COPY_BYTES / copy_s, 2 * _MATRIX**3 / product_s)


def check_case(model: ModelShape, case: KernelCase, device: str, ceilings: Ceilings) -> dict[str, Any]:
    """One kernel's figures: `model`, `operation`, `seconds`; `bytes_per_s` and `flops_per_s`, None where they say
    nothing; `share`, `share_of` which ceiling, `aim` and whether it is `reached`, None where there is no aim;
    `difference` from the reference in units of the largest magnitude, and whether it `is_right`."""
    run = getattr(_backend(case, "gpu"), case.function)
    expected_run = case.reference or getattr(_backend(case, "reference"), case.function)
    arguments = case.arguments(device)
    difference = _difference(run, expected_run, arguments)
    seconds, aim = _seconds(lambda: run(*arguments)), aim_of(case)
    if aim.of == LIBRARY:
        share = _library_seconds(*arguments[:2]) / seconds
    elif aim.of == COPY:
        share = case.moved_bytes / seconds / ceilings.bytes_per_s
    else:
        share = case.flops / seconds / ceilings.flops_per_s
    return {
        "model": model.name,
        "operation": case.name,
        "seconds": seconds,
        "bytes_per_s": case.moved_bytes / seconds if case.moved_bytes else None,
        "flops_per_s": case.flops / seconds if case.flops else None,
        "share": share,
        "share_of": aim.of,
        "aim": aim.share,
        "reached": None if aim.share is None else share >= aim.share,
        "difference": difference,
        "is_right": difference <= _TOLERANCE,
    }


def figure_line(figure: Mapping[str, Any]) -> str:
    """check_case's figures to read."""
    achieved = f"{figure['seconds'] * 1e6:8.1f} us"
    if figure["bytes_per_s"] is not None:
        achieved += f"  {figure['bytes_per_s'] / 1e12:6.2f} TB/s"
    if figure["flops_per_s"] is not None:
        achieved += f"  {figure['flops_per_s'] / 1e12:6.0f} TFLOP/s"
    share = f"{figure['share']:4.0%} of {figure['share_of']}{verdict(figure['share'], figure['aim'])}"
    is_right = "ok" if figure["is_right"] else "WRONG"
    name = f"{figure['model']:<14}{figure['operation']:<29}"
    return f"{name}{achieved}  {share}  differs by {figure['difference']:.1e} {is_right}"


def _backend(case: KernelCase, name: str) -> ModuleType:
    return importlib.import_module(f"batchinfer.kernels.{case.op}.{name}")


def _difference(run: Callable[..., Any], expected_run: Callable[..., Any], arguments: tuple[Any, ...]) -> float:
    """The largest difference of results and of arguments written in place, in units of the largest magnitude."""
    found: list[Any] = []
    wanted: list[Any] = []
    for call, results in ((run, found), (expected_run, wanted)):
        copies = [x.clone() if isinstance(x, Tensor) else x for x in arguments]
        returned = call(*copies)
        results.extend(returned if isinstance(returned, tuple) else (returned,))
        results.extend(copies)
    pairs = [(a, b) for a, b in zip(found, wanted, strict=True) if isinstance(a, Tensor)]
    return max(_relative(a, b) for a, b in pairs)


def _relative(actual: Tensor, expected: Tensor) -> float:
    actual, expected = actual.to(torch.float32), expected.to(torch.float32)
    if not torch.equal(actual.isnan(), expected.isnan()):
        return float("inf")
    scale = expected.nan_to_num().abs().max().clamp_min(1e-30)
    return float((actual - expected).nan_to_num().abs().max() / scale)


def _library_seconds(x: Tensor, weight: Any) -> float:
    """Of the product of x and a weight of the same sizes that is not quantised."""
    dense = torch.randn(weight.num_outputs, weight.num_inputs, device=x.device).to(x.dtype)
    return _seconds(lambda: x @ dense.T)


def _seconds(run: Callable[[], Any]) -> float:
    """Median time of a call on the device, with its cache flushed before each; meanwhile the host launches the call, so
    that the time that this takes is not measured."""
    flush = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
    times = []
    for _ in range(_REPEATS + 3):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        for _ in range(_FLUSHES):
            flush.zero_()
        begin.record()
        run()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e-3)
    return sorted(times[3:])[_REPEATS // 2]
