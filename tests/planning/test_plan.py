"""`batchinfer plan` from the command line: what it counts, what it reads, and that it loads no weights."""

import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_jobs import call, read_rows, save_tiny_model, write_jsonl

from batchinfer import roofline
from batchinfer.cli import main as command_line
from batchinfer.planning.job_rows import histogram
from batchinfer.roofline import DevicePeaks, StepTimes, load_step_times
from batchinfer.scheduling.lengths import OutputLengths

SAMPLES = Path(__file__).parents[2] / "sample_data"
PEAKS = DevicePeaks(10e9, 100e9, "a processor, fp32, 1 thread", "2026-01-31", 1)


@pytest.fixture(autouse=True)
def _known_peaks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(roofline, "profile_path", lambda: tmp_path / "profile" / "machine_profile.json")
    roofline.save_peaks("cpu", "fp32", PEAKS)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Without weights: the file is its head alone."""
    path = save_tiny_model(tmp_path_factory.mktemp("tiny") / "model", context=1024)
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[: 8 + int.from_bytes(file.read_bytes()[:8], "little")])
    return path


def exit_code(model: Path, *options: object) -> int:
    words = ["plan", "--model", str(model), "--device", "cpu", "--threads", "1", "--dtype", "fp32"]
    return command_line._run([*words, "--kv-cache-memory", "8MiB", *map(str, options)])


def plan(model: Path, tmp_path: Path, *options: object) -> dict[str, Any]:
    assert exit_code(model, "--json", tmp_path / "plan.json", *options) == 0
    return json.loads((tmp_path / "plan.json").read_text())


def test_rows_are_counted_as_a_run_counts_them(
    model: Path, tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = SAMPLES / "troublesome.jsonl"
    found = plan(model, tmp_path, "--input", source, "--max-model-len", 256)
    assert call(tiny_model, "--input", source, "--output", tmp_path / "out", "--max-model-len", 256) == 0
    rows = read_rows(tmp_path / "out")
    codes = [row["error_code"] for row in rows if row["error_code"] is not None]
    assert found["rows"]["total"] == found["rows"]["read"] == len(rows)
    assert found["rows"]["errors_by_code"] == {code: codes.count(code) for code in sorted(set(codes))}
    assert found["rows"]["errors"] == len(codes) > 3
    prompts = [row["prompt_tokens"] for row in rows if row["error_code"] is None]
    assert found["prompt_tokens"]["total"] == sum(prompts)
    assert found["prompt_tokens"]["percentiles"]["p100"] == max(prompts)
    assert sum(count for *_, count in found["prompt_tokens"]["histogram"]) == len(prompts)
    table = capsys.readouterr().out
    assert f"errors        {len(codes)} (" in table
    assert "unreadable_line" in table


def test_prompts_and_shared_beginnings(model: Path, tmp_path: Path) -> None:
    """BOS and 63 bytes in common make 4 blocks of 16, which the first of 5 rows computes."""
    rows = [{"prompt": "x" * 63 + letter * 10} for letter in "abcde"]
    source = write_jsonl(tmp_path / "rows.jsonl", rows)
    found = plan(model, tmp_path, "--input", source, "--max-tokens", 10, "--ignore-eos")
    assert found["prompt_tokens"] == {
        "total": 5 * 74,
        "mean": 74.0,
        "percentiles": {"p0": 74, "p10": 74, "p50": 74, "p90": 74, "p99": 74, "p100": 74},
        "histogram": [[64, 127, 5]],
    }
    assert found["prefix_cache"] == {"servable_tokens": 4 * 64, "share": 4 * 64 / (5 * 74)}
    assert found["cached_tokens"] == 4 * 64
    assert found["output_tokens"] == {"expected": 50, "source": "max_tokens of each row"}
    assert found["steps"] == 10
    assert found["concurrency"] == {"mean": 5.0, "peak": 5}
    # 4 common blocks, and of each row the 10 + 9 tokens beyond
    assert found["kv_blocks"]["peak"] == 4 + 5 * 2
    assert found["kv"]["job_tokens"] == 5 * (74 + 9)
    # 2 layers of keys and values, 2 heads of 16 in float32
    assert found["kv"]["bytes_by_dtype"]["fp32"] == {"per_token": 512, "job": 512 * 5 * 83}
    assert found["kv"]["bytes_by_dtype"]["int8"]["per_token"] == 2 * 2 * 2 * (16 + 4)
    assert found["kv"]["bytes_by_attention"]["MHA"]["per_token"] == 1024
    assert found["kv"]["attention"] == "GQA"


def test_the_plan_tells_rows_apart_as_a_run_does(
    model: Path, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The groups come to the scheduler of both, and no answer depends on them."""
    seen: list[str | None] = []
    class_of = OutputLengths.class_of
    monkeypatch.setattr(
        OutputLengths, "class_of", lambda self, request: (seen.append(request.length_group), class_of(self, request))[1]
    )
    rows = [{"prompt": "abc", "task": task} for task in ("sum", None, "list")]
    options = ("--input", write_jsonl(tmp_path / "rows.jsonl", rows), "--max-tokens", 5)
    plan(model, tmp_path, *options, "--length-class-column", "task")
    assert set(seen) == {"sum", "", "list"}
    seen.clear()
    assert call(tiny_model, *options, "--output", tmp_path / "with", "--length-class-column", "task") == 0
    assert set(seen) == {"sum", "", "list"}
    seen.clear()
    assert call(tiny_model, *options, "--output", tmp_path / "without") == 0
    assert set(seen) == {None}
    answers = [[row["completion"] for row in read_rows(tmp_path / name)] for name in ("with", "without")]
    assert answers[0] == answers[1]


def test_several_samples_of_a_row_are_as_many_requests(model: Path, tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "rows.jsonl", [{"prompt": "abc"}, {"prompt": None}])
    found = plan(model, tmp_path, "--input", source, "--max-tokens", 7, "--n", 3, "--ignore-eos")
    assert found["rows"]["completions"] == 3
    assert found["rows"]["errors_by_code"] == {"null_prompt": 1}
    assert found["output_tokens"]["expected"] == 21


def test_expected_lengths_bind_only_answers_that_may_end(model: Path, tmp_path: Path) -> None:
    rows = [{"prompt": "abc", "max_tokens": 50, "ignore_eos": i < 2} for i in range(5)]
    source = write_jsonl(tmp_path / "rows.jsonl", rows)
    found = plan(model, tmp_path, "--input", source, "--expected-output-tokens", 8)
    assert found["output_tokens"] == {"expected": 2 * 50 + 3 * 8, "source": "--expected-output-tokens 8"}


@pytest.mark.parametrize("may_end", [False, True])
def test_a_plan_by_max_tokens_says_whether_answers_may_end_before(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], may_end: bool
) -> None:
    rows = [{"prompt": "abc", "ignore_eos": not (may_end and i == 1)} for i in range(3)]
    plan(model, tmp_path, "--input", write_jsonl(tmp_path / "rows.jsonl", rows), "--max-tokens", 6)
    (line,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("answers"))
    assert line.startswith("answers       18 tokens expected, by max_tokens of each row")
    assert line.endswith("which --lengths-from or --expected-output-tokens foresees") == may_end


def test_lengths_of_an_earlier_run(model: Path, tiny_model: Path, tmp_path: Path) -> None:
    rows = [{"prompt": "ab" * i, "max_tokens": 5 * i} for i in (1, 2, 3)]
    source = write_jsonl(tmp_path / "rows.jsonl", rows)
    options = ("--input", source, "--temperature", 0)
    assert call(tiny_model, *options, "--ignore-eos", "--output", tmp_path / "out") == 0
    more = write_jsonl(tmp_path / "more.jsonl", [{"prompt": "abc", "max_tokens": 12} for _ in range(4)])
    found = plan(model, tmp_path, "--input", more, "--lengths-from", tmp_path / "out")
    assert found["output_tokens"]["expected"] == 5 + 10 + 12 + 5  # 15 is more than is allowed; the fourth is the first


def test_a_run_takes_lengths_of_an_earlier_run_too(tiny_model: Path, tmp_path: Path) -> None:
    """Rows alike but for their answers' lengths, two at once: those of longer answers start first once that is known,
    and the answers stay the same."""
    rows = [{"prompt": "abc", "max_tokens": 40, "stop_token_ids": [256], "seed": i} for i in range(8)]
    source = write_jsonl(tmp_path / "rows.jsonl", rows)
    options = ("--input", source, "--max-num-seqs", 2, "--temperature", 1.5)
    assert call(tiny_model, *options, "--output", tmp_path / "first") == 0
    again = ("--output", tmp_path / "second", "--lengths-from", tmp_path / "first")
    assert call(tiny_model, *options, *again) == 0
    first, second = (read_rows(tmp_path / name) for name in ("first", "second"))
    assert [row["completion"] for row in first] == [row["completion"] for row in second]
    lengths = [row["completion_tokens"] for row in first]
    assert len(set(lengths)) > 2
    started = sorted(range(8), key=lambda i: second[i]["queue_ms"])
    assert lengths[0] < max(lengths)
    assert 0 not in started[:2]  # which start in the same step, a hair's breadth apart
    assert max(lengths) in [lengths[row] for row in started[:2]]
    stats = json.loads((tmp_path / "second" / "_stats.json").read_text())
    assert stats["options"]["lengths_from"] == {"value": str(tmp_path / "first"), "source": "flag"}


def test_lengths_of_several_samples_of_an_earlier_run(model: Path, tiny_model: Path, tmp_path: Path) -> None:
    """Two rows of two samples each; a third sample takes the first one's length."""
    rows = [{"prompt": "ab", "max_tokens": 4}, {"prompt": "abc", "max_tokens": 9}]
    source = write_jsonl(tmp_path / "rows.jsonl", rows)
    assert call(tiny_model, "--input", source, "--n", 2, "--ignore-eos", "--output", tmp_path / "out") == 0
    options = (
        "--input",
        source,
        "--n",
        3,
        "--param-columns",
        "none",
        "--max-tokens",
        100,
        "--lengths-from",
        tmp_path / "out",
    )
    assert plan(model, tmp_path, *options)["output_tokens"]["expected"] == 3 * 4 + 3 * 9


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--expected-output-tokens", 3, "--lengths-from", "x"], "give one of them"),
        (
            ["--lengths-from", "nowhere"],
            "--lengths-from: nowhere: there is no such file or directory (wanted: the --output",
        ),
        (["--threads", 0], "threads = 0: must be from 1 to 1024"),
        (["--kv-cache-memory", "1KiB"], "a block of 16 tokens takes"),
        (["--max-model-len", 5000], "the model has positions for 1024 tokens"),
        (["--prompt-column", "nothing"], "no such column"),
        (["--length-class-column", "task"], "there is no such column; the columns are `prompt`"),
    ],
)
def test_faults_are_one_line(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[object], message: str
) -> None:
    source = write_jsonl(tmp_path / "rows.jsonl", [{"prompt": "abc"}])
    assert exit_code(model, "--input", source, *options) == 2
    last = capsys.readouterr().err.strip().splitlines()[-1]
    assert last.startswith("batchinfer: error: ")
    assert message in last


def test_weights_drawn_at_random_need_no_files(model: Path, tmp_path: Path) -> None:
    """A plan of the shape alone takes the memory and the steps that one of the files takes."""
    alone = tmp_path / "shape"
    alone.mkdir()
    (alone / "config.json").write_text((model / "config.json").read_text())
    source = write_jsonl(tmp_path / "rows.jsonl", [{"prompt_token_ids": [5, 6, 7]}, {"prompt_token_ids": [8] * 30}])
    options = ("--input", source, "--max-tokens", 4, "--ignore-eos", "--max-model-len", 64)
    whole = plan(model, tmp_path, *options)
    drawn = plan(alone, tmp_path, *options, "--load-format", "dummy")
    for figure in ("rows", "prompt_tokens", "steps", "kv_blocks"):
        assert drawn[figure] == whole[figure]
    assert drawn["memory"]["weights_bytes"] == whole["memory"]["weights_bytes"] > 0
    assert drawn["memory"]["cache_bytes"] == whole["memory"]["cache_bytes"]


def test_a_gpu_that_is_not_here_may_be_planned_for(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    source = write_jsonl(tmp_path / "rows.jsonl", [{"prompt": "abc"}])
    found = plan(model, tmp_path, "--input", source, "--device", "cuda", "--max-tokens", 5)
    assert found["time"] is None
    assert found["memory"]["free_bytes"] is None
    assert "not known: nothing was measured on this device" in capsys.readouterr().out
    words = ["plan", "--model", str(model), "--dtype", "fp32", "--device", "cuda", "--input", str(source)]
    assert command_line._run(words) == 2
    assert "give --kv-cache-memory SIZE" in capsys.readouterr().err


def test_time_is_the_roofline_of_the_device(model: Path, tmp_path: Path) -> None:
    """One row of one prompt token (BOS) and 4 answers: each of 4 steps reads all weights, whatever it computes."""
    source = write_jsonl(tmp_path / "rows.jsonl", [{"prompt": ""}])
    found = plan(model, tmp_path, "--input", source, "--max-tokens", 4, "--ignore-eos")
    assert found["steps"] == 4
    linear = 2 * (64 * 64 * 2 + 32 * 64 * 2 + 3 * 64 * 96)
    weights, cache = 4 * (linear + 260 * 64), 512 * (1 + 2 + 3 + 4)
    assert found["time"]["basis"] == "roofline"
    assert found["time"]["low_s"] == pytest.approx((4 * weights + cache) / PEAKS.bytes_per_s)
    assert found["time"]["output_tokens_per_s"]["high"] == pytest.approx(4 / found["time"]["low_s"])


def test_what_would_help_is_forecast(model: Path, tmp_path: Path) -> None:
    """64 rows of 40 + 40 tokens in a cache of 512 tokens run 6 at a time; twice the memory, twice as many."""
    rng = random.Random(0)
    rows = [{"prompt": "".join(rng.choice("abcdef") for _ in range(39))} for _ in range(64)]
    source = write_jsonl(tmp_path / "rows.jsonl", rows)
    options = ("--input", source, "--max-tokens", 40, "--ignore-eos", "--kv-cache-memory", "256KiB")
    found = plan(model, tmp_path, *options)
    advice = {entry["option"]: entry for entry in found["advice"]}
    more = plan(model, tmp_path, *options, "--kv-cache-memory", "512KiB")
    entry = advice["--kv-cache-memory 512KiB"]
    assert entry["steps"] == pytest.approx(more["steps"] / found["steps"], rel=0.05)
    assert entry["concurrency"] == pytest.approx(more["concurrency"]["mean"] / found["concurrency"]["mean"], rel=0.1)
    fp8 = plan(model, tmp_path, *options, "--kv-cache-dtype", "fp8")
    assert advice["--kv-cache-dtype fp8"]["steps"] == pytest.approx(fp8["steps"] / found["steps"], rel=0.1)
    times = [entry["time"] for entry in found["advice"]]
    assert times == sorted(times)
    assert max(times) < 0.98
    assert "--max-num-seqs 1024" not in advice  # memory is what is short


def test_large_inputs_are_sampled(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("batchinfer.planning.job_rows.MOST_ROWS", 300)
    monkeypatch.setattr("batchinfer.planning.job_rows._RUN_ROWS", 10)
    rows = [{"prompt": "abcd" if i % 2 else None, "max_tokens": 10, "ignore_eos": True} for i in range(1200)]
    source = write_jsonl(tmp_path / "rows.jsonl", rows)
    found = plan(model, tmp_path, "--input", source, "--max-num-seqs", 32)
    assert found["rows"] == {
        "total": 1200,
        "read": 300,
        "stride": 4,
        "completions": 600,
        "errors": 600,
        "errors_by_code": {"null_prompt": 600},
    }
    assert found["prompt_tokens"]["total"] == 600 * 5
    assert found["prompt_tokens"]["histogram"] == [[4, 7, 600]]
    assert found["method"] == "flow"
    assert found["steps"] == pytest.approx(600 / 32 * 10, rel=0.1)
    assert found["output_tokens"]["expected"] == 6000


def test_time_is_that_of_as_many_threads(model: Path, tmp_path: Path) -> None:
    """Twice the bandwidth and the products with two threads make half the time."""
    roofline.save_peaks("cpu", "fp32", DevicePeaks(20e9, 200e9, "a processor, fp32, 2 threads", "2026-01-31", 2))
    source = write_jsonl(tmp_path / "rows.jsonl", [{"prompt": "abcdef" * 20} for _ in range(3)])
    options = ("--input", source, "--max-tokens", 6, "--ignore-eos")
    one, two = (plan(model, tmp_path, *options, "--threads", threads)["time"] for threads in (1, 2))
    assert one["low_s"] == pytest.approx(2 * two["low_s"])
    assert (one["peaks"]["threads"], two["peaks"]["threads"]) == (1, 2)
    assert two["measured_on"] == "a processor, fp32, 2 threads, 2026-01-31"


def test_peaks_of_other_threads_are_measured_anew(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("batchinfer.executors.device_profile._MATMUL_SIZE", {"cpu": 128})
    monkeypatch.setattr("batchinfer.executors.device_profile._COPY_BYTES", 1 << 20)
    source = write_jsonl(tmp_path / "rows.jsonl", [{"prompt": "abc"}])
    before = torch.get_num_threads()
    try:
        found = plan(model, tmp_path, "--input", source, "--max-tokens", 5, "--ignore-eos", "--threads", 2)
    finally:
        torch.set_num_threads(before)
    assert found["time"]["measured_on"].partition(" threads, ")[0].endswith(", fp32, 2")


def test_calibration_is_kept_and_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("batchinfer.executors.device_profile._SECONDS", 0.2)
    whole = save_tiny_model(tmp_path / "whole", context=1024)
    source = write_jsonl(tmp_path / "rows.jsonl", [{"prompt": "abc"}])
    options = ("--input", source, "--max-tokens", 5, "--ignore-eos")
    found = plan(whole, tmp_path, *options, "--calibrate")
    assert found["time"]["basis"] == "calibrated"
    entry = json.loads(roofline.profile_path().read_text())["step_times"][0]
    assert (entry["device"], entry["threads"], entry["dtype"]) == ("cpu", 1, "fp32")
    key = {name: entry[name] for name in ("device", "threads", "model", "dtype", "activation_dtype", "kv_cache_dtype")}
    key |= {"kv_cache_dtype_skip_layers": "", "enforce_eager": False}
    assert load_step_times(key) is not None
    roofline.save_step_times(key, StepTimes((1, 100), (2.0, 2.0), 0.0, 0.0, 0.0, 0.0, "a clock", "2026-01-31"))
    assert plan(whole, tmp_path, *options)["time"]["middle_s"] == pytest.approx(10.0)
    capsys.readouterr()
    assert plan(whole, tmp_path, *options, "--threads", 2)["time"]["basis"] == "roofline"
    assert "timed with --threads 1, which says nothing of --threads 2" in capsys.readouterr().err
    assert plan(whole, tmp_path, *options, "--kv-cache-dtype", "fp8")["time"]["basis"] == "roofline"
    words = (
        "the steps of this model were timed with --kv-cache-dtype fp32, which says nothing of --kv-cache-dtype fp8: "
    )
    assert words + "the time is the roofline's until --calibrate times them with that" in capsys.readouterr().err
    skipped = ("--kv-cache-dtype", "fp8", "--kv-cache-dtype-skip-layers", "0")
    roofline.save_step_times({**key, "kv_cache_dtype": "fp8"}, load_step_times(key))
    plan(whole, tmp_path, *options, *skipped)
    words = "with no --kv-cache-dtype-skip-layers, which says nothing of --kv-cache-dtype-skip-layers 0: "
    assert words in capsys.readouterr().err
    plan(whole, tmp_path, *options, *skipped[:2])
    assert "says nothing of" not in capsys.readouterr().err


def test_histogram_bins_double() -> None:
    assert histogram([]) == []
    assert histogram([0, 1, 2, 3, 4, 7, 9]) == [(0, 0, 1), (1, 1, 1), (2, 3, 2), (4, 7, 2), (8, 15, 1)]
    assert histogram([5, 100]) == [(4, 7, 1), (8, 15, 0), (16, 31, 0), (32, 63, 0), (64, 127, 1)]


def test_a_plan_loads_torch_only_for_what_it_asks_of_it(model: Path, tmp_path: Path) -> None:
    """Not for faults of the input and of the model, nor for help."""
    source = write_jsonl(tmp_path / "rows.jsonl", [{"prompt": "abc"}])
    calls = [
        (["plan", "--help"], 0),
        (["plan", "--input", str(tmp_path / "absent.jsonl")], 2),
        (["plan", "--input", str(source), "--model", str(tmp_path)], 2),
    ]
    code = "import sys\nfrom batchinfer.cli.main import _run\n"
    code += f"print([int(_run(words)) for words, _ in {calls!r}], 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == f"{[code for _, code in calls]} False"


def test_how_far_a_fit_is_off_is_told_only_where_steps_tell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The 8 shapes that are always timed have 8 counts of tokens or fewer, and the fit 3 unknowns more."""
    monkeypatch.setattr("batchinfer.executors.device_profile._SECONDS", 0.0)
    whole = save_tiny_model(tmp_path / "whole", context=1024)
    source = write_jsonl(tmp_path / "rows.jsonl", [{"prompt": "abc"}])
    plan(whole, tmp_path, "--input", source, "--max-tokens", 5, "--calibrate")
    said = capsys.readouterr().err
    assert "8 steps timed, no more than the fit has unknowns" in said
    assert "0.0%" not in said
