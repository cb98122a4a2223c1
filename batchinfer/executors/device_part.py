"""One part of the check of a GPU, in a process of its own: it does what its task says and tells of it on stdout, a JSON
object a line. Started by part_process.py, asked for by gpu_check.py.

A task has `part`, `device` and `seconds`, after which nothing more is begun. Of kernels: `models`, and `first`, the
number of the case to begin with. Of a model: `shape`, `workloads` and `num_seqs`. Events, by `event`: `cases` (names),
`ceilings` (line, figures), `begin` (number), `figure` (line, figures, and of a model the workload), `failed` (message),
`news` (text)."""

import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

Tell = Callable[..., None]
_WORKLOAD_S = 20.0  # that each workload is measured for where the time suffices
_BROKEN = 3  # exit code: the device takes no more work from this process


def main() -> None:
    """The task is the command line's one argument. What libraries print on stdout goes to stderr."""
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def tell(event: str, **values: Any) -> None:
        out.write(json.dumps({"event": event, **values}) + "\n")
        out.flush()

    task = json.loads(sys.argv[1])
    run = {"kernels": run_kernels, "model": run_model}[task["part"]]
    run(task, tell)


def run_kernels(task: Mapping[str, Any], tell: Tell) -> None:
    """Checks cases until the time is over. One that raises is told of, and the next one follows where the device still
    works."""
    end, device = time.monotonic() + task["seconds"], task["device"]
    from batchinfer.executors.kernel_cases import models
    from batchinfer.executors.kernel_device import check_case, device_cases, figure_line, measure_ceilings

    todo = device_cases(models(task["models"]))
    tell("cases", names=[f"{model.name} {case.name}" for model, case in todo])
    ceilings = measure_ceilings(device)
    tell("ceilings", line=ceilings.line(), figures=ceilings.to_json())
    for number, (model, case) in enumerate(todo[task["first"] :], task["first"]):
        if time.monotonic() >= end:
            return
        tell("begin", number=number)
        try:
            figures = check_case(model, case, device, ceilings)
            tell("figure", line=figure_line(figures), figures=figures)
        except Exception as error:
            tell("failed", message=_in_one_line(error))
            if not _works(device):
                sys.exit(_BROKEN)


def run_model(task: Mapping[str, Any], tell: Tell) -> None:
    """Measures the workloads, each for an equal share of what is left of the time, and leaves out those for which it
    does not suffice."""
    end = time.monotonic() + task["seconds"]
    from batchinfer.executors.model_speed import Workload, figures_line, measure_model, speed_config

    config = speed_config({"device": task["device"], "max_num_seqs": task["num_seqs"]})
    loads = [Workload.parse(text) for text in task["workloads"]]
    try:
        for figures in measure_model(
            task["shape"], loads, config, _WORKLOAD_S, lambda line: tell("news", text=line), end
        ):
            workload = f"{figures['num_inputs']}/{figures['num_outputs']}"
            tell("figure", line=figures_line(figures), figures=figures, workload=workload)
    except Exception as error:
        tell("failed", message=_in_one_line(error))
        sys.exit(_BROKEN)


def _works(device: str) -> bool:
    """Whether the device does anything for this process after an error: most leave it as it was, some break it."""
    import torch

    try:
        return float(torch.ones(1, device=device)) == 1.0
    except RuntimeError:
        return False


def _in_one_line(error: Exception) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
