"""Checks a GPU within a given time: its kernels against their references and the device's ceilings, and a whole model
beside its roofline. Called by `bench kernels`.

Each part runs in a process of its own (device_part.py), because an error may leave a device of no use to the process
that caused it, and because nothing else ends a kernel that hangs: a part that fails costs no other its figures."""

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from batchinfer.executors.part_process import OUT_OF_TIME, run_part
from batchinfer.roofline import machine_name
from batchinfer.units import format_duration

PARTS = ("kernels", "model")
_KERNEL_SHARE = 0.45  # of the time, where there is a model as well; what it leaves over is the kernels' again
_LEAST_S = 1.0  # in which a part can do anything
_MARGIN = 0.1  # of a part's time, between when it is to end and when it is ended
_MOST_MARGIN_S = 10.0
_SILENT_S = 90.0  # that a case of a kernel may take
_NEWS_EVERY = 20  # cases

Show = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckRequest:
    """parts: of PARTS. models: names of kernel_cases.MODELS, whose kernels are checked in this order; none: all. shape,
    workloads, num_seqs: of the model, as bench model has them. device: "cuda", or "cpu" for the model alone."""

    parts: tuple[str, ...]
    models: tuple[str, ...]
    shape: str
    workloads: tuple[str, ...]
    num_seqs: int
    device: str
    budget_s: float


@dataclass(slots=True)
class Found:
    """kernels, model: figures as kernel_device.check_case and model_speed.measure_model give them. failures: each with
    part, what and message. left_out: in words."""

    ceilings: Mapping[str, Any] | None = None
    kernels: list[Mapping[str, Any]] = field(default_factory=list)
    model: list[Mapping[str, Any]] = field(default_factory=list)
    failures: list[dict[str, str]] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)

    @property
    def num_wrong(self) -> int:
        """Kernels that differ from their references."""
        return sum(not figure["is_right"] for figure in self.kernels)


class GpuCheck:
    """`run` once; `summary` and `to_json` tell what was found, also where it was interrupted.

    show: gets the lines of the report. report: gets those that tell how far it is.
    """

    def __init__(self, request: CheckRequest, show: Show, report: Show) -> None:
        self.found = Found()
        self._request = request
        self._show = show
        self._report = report
        self._start = time.monotonic()
        self._case_names: list[str] = []
        self._next_case = 0  # the first that was not begun
        self._open_case: int | None = None  # begun, and not told of
        self._kernels_fail = False  # before any of them begins
        self._open_workloads = list(request.workloads)

    def run(self) -> None:
        parts, budget_s = set(self._request.parts), self._request.budget_s
        if "kernels" in parts:
            self._check_kernels(self._start + budget_s * (_KERNEL_SHARE if "model" in parts else 1.0))
        if "model" in parts:
            self._measure_model(self._start + budget_s)
        if parts == set(PARTS):
            self._check_kernels(self._start + budget_s)
        self._say_what_is_left_out()

    def _check_kernels(self, end: float) -> None:
        """Goes on with the cases that are left. A process that ends in a case is followed by another one, which begins
        with the next case, unless it did not get as far as to begin one."""
        while not self._kernels_fail and (not self._case_names or self._next_case < len(self._case_names)):
            left_s, before = end - time.monotonic(), self._next_case
            if left_s < _LEAST_S:
                return
            task = {"models": self._request.models, "first": before}
            self._open_case = None
            died = self._run("kernels", task, left_s, _SILENT_S, self._take_kernel)
            if died is None:  # all are done, or the time is over
                return
            if died == OUT_OF_TIME:
                self._take_up_later()
                return
            if self._open_case is not None:
                self._fail("kernels", self._case_names[self._open_case], died)
            elif self._next_case == before:
                self._kernels_fail = True
                self._fail("kernels", "kernels", died)

    def _take_up_later(self) -> None:
        if self._open_case is not None:
            self._report(f"{self._case_names[self._open_case]}: not done when the time of its part was over")
            self._next_case = self._open_case

    def _take_kernel(self, event: Mapping[str, Any]) -> None:
        if event["event"] == "cases":
            self._case_names = event["names"]
        elif event["event"] == "ceilings" and self.found.ceilings is None:
            self.found.ceilings = event["figures"]
            self._show(event["line"])
        elif event["event"] == "begin":
            self._open_case, self._next_case = event["number"], event["number"] + 1
            if self._open_case % _NEWS_EVERY == 0:
                self._report(f"kernel {self._open_case + 1} of {len(self._case_names)}, {self._time()}")
        elif event["event"] == "figure":
            self._open_case = None
            self.found.kernels.append(event["figures"])
            self._show(event["line"])
        elif event["event"] == "failed" and self._open_case is not None:
            self._fail("kernels", self._case_names[self._open_case], event["message"])
            self._open_case = None

    def _measure_model(self, end: float) -> None:
        left_s, request, failures = end - time.monotonic(), self._request, len(self.found.failures)
        if left_s < _LEAST_S:
            return
        task = {"shape": request.shape, "workloads": request.workloads, "num_seqs": request.num_seqs}
        died = self._run("model", task, left_s, left_s, self._take_model)
        if died is not None and len(self.found.failures) == failures:
            self._fail("model", f"model {request.shape}", died)

    def _take_model(self, event: Mapping[str, Any]) -> None:
        if event["event"] == "news":
            self._report(f"{event['text']}, {self._time()}")
        elif event["event"] == "failed":
            self._fail("model", f"model {self._request.shape}", event["message"])
        elif event["event"] == "figure":
            self._open_workloads.remove(event["workload"])
            self.found.model.append(event["figures"])
            self._show(event["line"])

    def _run(
        self, part: str, task: Mapping[str, Any], left_s: float, silent_s: float, take: Callable[[Any], None]
    ) -> str | None:
        margin_s = min(_MOST_MARGIN_S, _MARGIN * left_s)
        task = {"part": part, "device": self._request.device, "seconds": left_s - margin_s, **task}
        return run_part(task, left_s, silent_s, take)

    def _fail(self, part: str, what: str, message: str) -> None:
        self.found.failures.append({"part": part, "what": what, "message": message})
        self._show(f"{what}: FAILED: {message}")

    def _say_what_is_left_out(self) -> None:
        if "kernels" in self._request.parts:
            self.found.left_out += self._case_names[self._next_case :] if self._case_names else ["all kernels"]
        if "model" in self._request.parts:
            self.found.left_out += [f"model {self._request.shape} {workload}" for workload in self._open_workloads]

    def _time(self) -> str:
        spent, budget = time.monotonic() - self._start, self._request.budget_s
        return f"after {format_duration(spent)} of {format_duration(budget)}"

    def summary(self) -> list[str]:
        found = self.found
        aimed = [figure["reached"] for figure in (*found.kernels, *found.model) if figure["reached"] is not None]
        lines = [
            f"{len(found.kernels)} kernels checked, {found.num_wrong} differ from their references; "
            f"{sum(aimed)} of {len(aimed)} aims reached; {len(found.failures)} failures; {self._time()}"
        ]
        if found.left_out:
            lines.append(f"left out ({len(found.left_out)}): {'; '.join(found.left_out)}")
        return lines

    def to_json(self) -> dict[str, Any]:
        """The request, what was found as JSON types, `machine`, and the `seconds` that it took."""
        place = {"machine": machine_name(self._request.device), "seconds": time.monotonic() - self._start}
        return {**asdict(self._request), **place, **asdict(self.found)}
