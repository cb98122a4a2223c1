"""Runs the GPU kernels on a device: right against their references, and how near to what the device can do. Called by
`bench kernels`."""

import importlib
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from batchinfer.executors.kernel_cases import KernelCase, ModelShape, cases

_REPEATS = 20
_COPY_BYTES = 1 << 30
_MATRIX = 8192
_TOLERANCE = 2e-2  # of the largest magnitude: bf16 results of sums in another order


def ready(device: str) -> bool:
    return torch.device(device).type == "cuda" and torch.cuda.is_available()


def checks(models: Sequence[ModelShape], device: str) -> Iterator[tuple[str, bool]]:
    """Lines of a report, and whether what each says is right."""
    from batchinfer.kernels.common.triton_targets import current  # here, as it brings Triton

    bandwidth, rate = _copy_bandwidth(device), _matrix_rate(device)
    yield f"copy {bandwidth / 1e12:.2f} TB/s, matrix product {rate / 1e12:.0f} TFLOP/s (bf16)", True
    for model in models:
        for case in cases(model):
            if case.needs_e4m3 and not current().has_e4m3:
                continue
            yield _check(model, case, device, bandwidth, rate)


def _check(model: ModelShape, case: KernelCase, device: str, bandwidth: float, rate: float) -> tuple[str, bool]:
    run = getattr(_backend(case, "gpu"), case.function)
    expected_run = case.reference or getattr(_backend(case, "reference"), case.function)
    arguments = case.arguments(device)
    difference = _difference(run, expected_run, arguments)
    seconds = _seconds(lambda: run(*arguments))
    achieved = f"{seconds * 1e6:8.1f} us"
    if case.moved_bytes:
        share = case.moved_bytes / seconds / bandwidth
        achieved += f"  {case.moved_bytes / seconds / 1e12:6.2f} TB/s ({share:4.0%} of copy)"
    if case.flops:
        achieved += (
            f"  {case.flops / seconds / 1e12:6.0f} TFLOP/s ({case.flops / seconds / rate:4.0%} of matrix product)"
        )
    is_right = difference <= _TOLERANCE
    verdict = "ok" if is_right else "WRONG"
    return f"{model.name:<14}{case.name:<29}{achieved}  differs by {difference:.1e} {verdict}", is_right


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


def _seconds(run: Callable[[], Any]) -> float:
    """Median time of a call, with the device's cache flushed before each."""
    flush = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
    times = []
    for _ in range(_REPEATS + 3):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        flush.zero_()
        begin.record()
        run()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e-3)
    return sorted(times[3:])[_REPEATS // 2]


def _copy_bandwidth(device: str) -> float:
    """Bytes read and written a second."""
    source = torch.zeros(_COPY_BYTES, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * _COPY_BYTES / _seconds(lambda: target.copy_(source))


def _matrix_rate(device: str) -> float:
    a, b = (torch.randn(_MATRIX, _MATRIX, device=device).to(torch.bfloat16) for _ in range(2))
    return 2 * _MATRIX**3 / _seconds(lambda: a @ b)
