"""The part of a GPU's check that runs its kernels, under Triton's interpreter as triton_interpreted.py is: at small
sizes and without the device's clock."""

import pytest
import torch

from batchinfer.executors import device_part, kernel_cases, kernel_device
from batchinfer.executors.kernel_cases import ModelShape

# Half of the vocabulary is more than the tokens that a row has changed: no row names one twice, which it must not.
SMALL = ModelShape("small", 128, 4, 2, 32, 128, 640)


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    """float16 stands for bf16, which the interpreter computes wrongly."""
    for name, value in {"CHUNK": 20, "NUM_SEQS": 3, "CONTEXT": 48}.items():
        monkeypatch.setattr(kernel_cases, name, value)
    monkeypatch.setattr(kernel_cases, "_values", lambda device, *shape: torch.randn(*shape).half())
    monkeypatch.setattr(kernel_cases, "CACHES", {"fp16": torch.float16, "int8": torch.int8})
    rows = {("packed_linear", "int4"): (1, 300), ("quantized_linear", "int8"): (16,)}
    monkeypatch.setattr(kernel_cases, "LINEAR_ROWS", rows)
    monkeypatch.setattr(kernel_cases, "models", lambda names: [SMALL])
    monkeypatch.setattr(kernel_device, "_COPY_BYTES", 1 << 10)
    monkeypatch.setattr(kernel_device, "_MATRIX", 16)
    monkeypatch.setattr(kernel_device, "_seconds", _a_millisecond)


def _a_millisecond(call):
    call()
    return 1e-3


def run(**task):
    events = []
    task = {"models": (), "first": 0, "seconds": 600.0, "device": "cpu", **task}
    device_part.run_kernels(task, lambda event, **values: events.append((event, values)))
    return events


@pytest.mark.slow
def test_every_kernel_is_checked_and_measured(monkeypatch):
    some = [case for case in kernel_cases.cases(SMALL) if case.op != "sampling" or case.name == "greedy"]
    monkeypatch.setattr(kernel_device, "cases", lambda model: some)
    (_, names), (_, ceilings), *events = run()
    assert ceilings["figures"] == {"bytes_per_s": 2 * 2**10 / 1e-3, "flops_per_s": 2 * 16**3 / 1e-3}
    begun = [values["number"] for event, values in events if event == "begin"]
    assert begun == list(range(len(names["names"])))
    assert [values for event, values in events if event == "failed"] == []
    figures = [values["figures"] for event, values in events if event == "figure"]
    assert [f"small {figure['operation']}" for figure in figures] == names["names"]
    assert [figure["operation"] for figure in figures if not figure["is_right"]] == []
    norm = figures[0]
    assert norm["bytes_per_s"] == pytest.approx(4 * 2 * 20 * 128 / 1e-3)
    assert norm["share"] == pytest.approx(4 * 20 * 128 / 2**10)
    assert (norm["aim"], norm["reached"]) == (0.85, True)
    by_name = {figure["operation"]: figure for figure in figures}
    assert by_name["packed_linear int4, 300"]["flops_per_s"] == pytest.approx(2 * 300 * 256 * 128 / 1e-3)


def test_a_kernel_that_is_wrong_and_one_that_raises(monkeypatch):
    from batchinfer.kernels.gated_activation import gpu as gated
    from batchinfer.kernels.rms_norm import gpu as norm

    some = [case for case in kernel_cases.cases(SMALL) if case.op in ("rms_norm", "gated_activation")]
    monkeypatch.setattr(kernel_device, "cases", lambda model: some)
    monkeypatch.setattr(gated, "gated_activation", lambda x, kind: x[:, : x.shape[1] // 2])
    monkeypatch.setattr(norm, "rms_norm", lambda *arguments: 1 / 0)
    events = run()
    failed = [number for number, (event, _) in enumerate(events) if event == "failed"]
    assert [events[number] for number in failed] == [("failed", {"message": "ZeroDivisionError: division by zero"})]
    assert events[failed[0] + 1][0] == "begin"
    wrong = [values for event, values in events if event == "figure" and not values["figures"]["is_right"]]
    assert [values["figures"]["operation"] for values in wrong] == ["gated_activation"]
    assert wrong[0]["line"].endswith("WRONG")


def test_a_later_process_goes_on_and_ends_with_its_time():
    names = run(seconds=0.0)[0][1]["names"]
    events = run(first=len(names) - 1)
    assert [values["number"] for event, values in events if event == "begin"] == [len(names) - 1]
    assert [event for event, _ in run(seconds=0.0)] == ["cases", "ceilings"]
