"""A machine for GPU work may lack the packages `datasets` and `gguf`: all that a run imports, the GPU's side included,
does without them."""

import json
import subprocess
import sys
from pathlib import Path

BLOCK = """
import importlib, sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {"datasets", "gguf"}:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Absent())
for name in ("datasets", "gguf"):
    try:
        importlib.import_module(name)
    except ModuleNotFoundError:
        continue
    raise AssertionError(f"{name} is not blocked")
"""
GPU_SIDE = """
for op in ("gated_activation", "kv_store", "paged_attention", "quantized_linear", "rms_norm", "rotary"):
    importlib.import_module(f"batchinfer.kernels.{op}.gpu")
importlib.import_module("batchinfer.executors.gpu_steps")
from batchinfer.cli.main import main
main(sys.argv[1:])
"""


def test_a_job_runs_and_the_gpus_modules_load(tmp_path: Path, tiny_model: Path) -> None:
    rows = [{"prompt": "a b"}, {"prompt": "c"}]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = ["--model", str(tiny_model), "--device", "cpu", "--threads", "1", "--kv-cache-memory", "1MiB"]
    options += ["--max-tokens", "4", "--temperature", "0", "--output", str(tmp_path / "out.jsonl")]
    command = [sys.executable, "-c", BLOCK + GPU_SIDE, "run", "--input", str(tmp_path / "in.jsonl"), *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    answers = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [answer["prompt"] for answer in answers] == ["a b", "c"]
    assert all(answer["finish_reason"] in ("length", "stop") for answer in answers)
