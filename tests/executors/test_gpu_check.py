"""The check of a GPU: its parts in processes of their own, played by small programs, within a time; and what is left of
it where one of them fails, hangs or is too slow."""

import json
import time

import pytest

from batchinfer.executors import device_part, gpu_check, part_process
from batchinfer.executors.aims import COPY, LIBRARY, PRODUCT, aim_of, verdict
from batchinfer.executors.gpu_check import CheckRequest, GpuCheck
from batchinfer.executors.kernel_cases import MODELS, cases

# A part: six kernels, of which `on` says what happens at some of them, and a model with its workloads.
PART = """
import json, os, sys, time
begun = time.monotonic()
task = json.loads(sys.argv[1])
def tell(event, **values):
    print(json.dumps(dict(event=event, **values)), flush=True)
if task["part"] == "kernels":
    tell("cases", names=[f"kernel {i}" for i in range(6)])
    tell("ceilings", line="copy", figures=dict(bytes_per_s=1, flops_per_s=2))
    for number in range(task["first"], 6):
        if time.monotonic() > begun + task["seconds"]: sys.exit()
        tell("begin", number=number)
        ON_CASE
        tell("figure", line=f"line {number}", figures=dict(number=number, is_right=number != 5, reached=number > 2))
else:
    tell("news", text="loading")
    for workload in task["workloads"]:
        ON_WORKLOAD
        tell("figure", line=workload, figures=dict(workload=workload, reached=None), workload=workload)
"""


def check(monkeypatch, on_case="pass", on_workload="pass", code=None, budget_s=30.0, parts=("kernels", "model")):
    code = code or PART.replace("ON_CASE", on_case).replace("ON_WORKLOAD", on_workload)
    monkeypatch.setattr(part_process, "START", code)
    lines, news = [], []
    request = CheckRequest(
        parts=parts,
        models=(),
        shape="tiny",
        workloads=("9/5", "2/2"),
        num_seqs=4,
        device="cpu",
        budget_s=budget_s,
    )
    done = GpuCheck(request, lines.append, news.append)
    done.run()
    return done, lines, news


def numbers(done):
    return [figure["number"] for figure in done.found.kernels]


def test_all_is_done_and_told(monkeypatch):
    done, lines, news = check(monkeypatch)
    assert lines == ["copy", *(f"line {i}" for i in range(6)), "9/5", "2/2"]
    assert [line.partition(",")[0] for line in news] == ["kernel 1 of 6", "loading"]
    assert (done.found.failures, done.found.left_out, done.found.num_wrong) == ([], [], 1)
    assert done.summary()[0].startswith("6 kernels checked, 1 differ from their references; 3 of 6 aims reached; 0 fai")
    written = json.loads(json.dumps(done.to_json()))
    assert [figure["workload"] for figure in written["model"]] == ["9/5", "2/2"]
    assert written["ceilings"] == {"bytes_per_s": 1, "flops_per_s": 2}


def test_a_case_that_raises_costs_no_other(monkeypatch):
    on_case = "if number == 1: tell('failed', message='Error: x'); continue"
    done, lines, _ = check(monkeypatch, on_case)
    assert numbers(done) == [0, 2, 3, 4, 5]
    assert done.found.failures == [{"part": "kernels", "what": "kernel 1", "message": "Error: x"}]
    assert "kernel 1: FAILED: Error: x" in lines
    assert len(done.found.model) == 2


def test_a_case_that_ends_the_process_costs_no_other(monkeypatch):
    on_case = """
        if number == 2: os.kill(os.getpid(), 9)
        if number == 4: tell('failed', message='device broken'); sys.exit(3)"""
    done, lines, _ = check(monkeypatch, on_case)
    assert numbers(done) == [0, 1, 3, 5]
    messages = {failure["what"]: failure["message"] for failure in done.found.failures}
    assert messages == {"kernel 2": "ended by SIGKILL", "kernel 4": "device broken"}
    assert lines.count("copy") == 1


def test_a_case_that_hangs_is_ended(monkeypatch):
    monkeypatch.setattr(gpu_check, "_SILENT_S", 1.5)
    done, _, _ = check(monkeypatch, "if number == 0: time.sleep(60)")
    assert numbers(done) == [1, 2, 3, 4, 5]
    (failure,) = done.found.failures
    assert failure == {"part": "kernels", "what": "kernel 0", "message": "nothing came for 1.5 s"}


def test_a_part_that_does_not_start_costs_no_other(monkeypatch):
    code = PART.replace("ON_CASE", "").replace("ON_WORKLOAD", "pass")
    done, _, _ = check(monkeypatch, code=code.replace('"kernels":', '"kernels":\n    raise OSError("no driver")', 1))
    (failure,) = done.found.failures
    assert failure == {"part": "kernels", "what": "kernels", "message": "exit code 1: OSError: no driver"}
    assert len(done.found.model) == 2
    assert done.found.left_out == ["all kernels"]


def test_a_model_that_fails_half_way_keeps_what_it_has(monkeypatch):
    done, _, _ = check(monkeypatch, on_workload="if workload == '2/2': raise MemoryError('full')")
    assert [figure["workload"] for figure in done.found.model] == ["9/5"]
    assert done.found.failures[0]["message"] == "exit code 1: MemoryError: full"
    assert done.found.left_out == ["model tiny 2/2"]
    assert len(done.found.kernels) == 6


def test_the_time_is_kept_and_what_it_did_not_suffice_for_is_said(monkeypatch):
    """Kernels get 45% of it and go on with what the model leaves over, which takes none here."""
    start = time.monotonic()
    done, lines, _ = check(monkeypatch, "time.sleep(0.7)", budget_s=4.0)
    assert time.monotonic() - start < 5.0
    assert lines.index("9/5") > lines.index("line 0")
    assert numbers(done) == list(range(len(numbers(done))))
    assert len(done.found.left_out) + len(numbers(done)) + len(done.found.failures) == 6
    assert done.found.left_out
    assert done.summary()[1].startswith(f"left out ({len(done.found.left_out)}): kernel ")


def test_a_model_that_does_not_end_is_ended(monkeypatch):
    start = time.monotonic()
    done, _, _ = check(monkeypatch, on_workload="time.sleep(60)", budget_s=2.0, parts=("model",))
    assert time.monotonic() - start < 6.0
    assert done.found.failures == [{"part": "model", "what": "model tiny", "message": "it did not end within its time"}]
    assert done.found.left_out == ["model tiny 9/5", "model tiny 2/2"]
    assert done.found.kernels == []


def test_the_model_part_measures_on_a_cpu(monkeypatch):
    monkeypatch.setattr(device_part, "_WORKLOAD_S", 0.3)
    events = []
    task = {"seconds": 7.0, "device": "cpu", "shape": "tiny", "workloads": ["20/6", "5/10"], "num_seqs": 4}
    device_part.run_model(task, lambda event, **values: events.append((event, values)))
    figures = [values for event, values in events if event == "figure"]
    assert [values["workload"] for values in figures] == ["20/6", "5/10"]
    assert {event for event, _ in events} == {"news", "figure"}
    assert all(values["figures"]["steps"] > 0 for values in figures)
    assert all(0.3 <= values["figures"]["seconds"] < 3 for values in figures)


def test_a_model_that_cannot_be_loaded_says_why():
    events = []
    task = {"seconds": 5.0, "device": "cpu", "shape": "none", "workloads": ["20/6"], "num_seqs": 4}
    with pytest.raises(SystemExit):
        device_part.run_model(task, lambda event, **values: events.append((event, values)))
    assert events == [("failed", {"message": "KeyError: 'none'"})]


@pytest.mark.slow
def test_the_whole_process_of_a_model_on_a_cpu(monkeypatch):
    lines = []
    request = CheckRequest(
        parts=("model",), models=(), shape="tiny", workloads=("9/5",), num_seqs=4, device="cpu", budget_s=20.0
    )
    done = GpuCheck(request, lines.append, lambda line: None)
    done.run()
    assert (done.found.failures, done.found.left_out) == ([], [])
    assert lines[0].startswith("9/5: ")


@pytest.mark.parametrize(
    ("operation", "of", "share"),
    [
        ("attention, new tokens, fp8", COPY, 0.8),
        ("attention, prompt, bf16", PRODUCT, 0.55),
        ("packed_linear int4, 1", COPY, 0.7),
        ("packed_linear int4, 16", COPY, 0.7),
        ("packed_linear int4, 32", COPY, None),
        ("packed_linear int4, 256", PRODUCT, None),
        ("packed_linear int4, 512", LIBRARY, 0.75),
        ("packed_linear int4, 4096", LIBRARY, 0.75),
        ("packed_linear fp8, 16", COPY, None),
        ("add_rms_norm", COPY, 0.85),
        ("rotary_kv_store fp8", COPY, 0.85),
        ("gated_activation", COPY, 0.85),
        ("greedy", COPY, None),
    ],
)
def test_aims(operation, of, share):
    (case,) = [case for case in cases(MODELS[0]) if case.name == operation]
    assert (aim_of(case).of, aim_of(case).share) == (of, share)


def test_an_aim_stands_beside_its_figure():
    assert verdict(0.8, 0.8) == ", aim 80% reached"
    assert verdict(0.799, 0.8) == ", aim 80% NOT reached"
    assert verdict(0.5, None) == ""
