"""Whole jobs on a model that takes no time: a tiny random Llama over bytes, inputs in both formats, and the command
line in this process or in one of its own."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from small_tokenizers import BOS, EOS, LLAMA3_TEMPLATE, VOCAB_SIZE, save_byte_level

from batchinfer.cli import main as command_line

CONTEXT = 256  # positions of the model
TIMES = (
    *("queue_ms", "prefill_ms", "ttft_ms", "tbt_mean_ms", "tbt_p50_ms", "tbt_p99_ms", "tbt_max_ms", "latency_ms"),
    *("cached_prompt_tokens", "num_preemptions"),
)  # what may differ between two runs of a job


def save_tiny_model(path: Path, adds_bos: bool = True, hidden_size: int = 64, context: int = CONTEXT) -> Path:
    """A directory as Hugging Face saves a Llama of two layers: heads of 16, half as many for keys and values."""
    import torch
    from safetensors.torch import save_file

    heads, width = hidden_size // 16, 3 * hidden_size // 2
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "torch_dtype": "float32",
        "vocab_size": VOCAB_SIZE,
        "hidden_size": hidden_size,
        "intermediate_size": width,
        "num_hidden_layers": 2,
        "num_attention_heads": heads,
        "num_key_value_heads": heads // 2,
        "max_position_embeddings": context,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
    }
    shapes = {"model.embed_tokens": (VOCAB_SIZE, hidden_size), "lm_head": (VOCAB_SIZE, hidden_size)}
    for layer in ("model.layers.0", "model.layers.1"):
        shapes |= {f"{layer}.self_attn.{name}_proj": (hidden_size, hidden_size) for name in "qo"}
        shapes |= {f"{layer}.self_attn.{name}_proj": (hidden_size // 2, hidden_size) for name in "kv"}
        shapes |= {f"{layer}.mlp.{name}_proj": (width, hidden_size) for name in ("gate", "up")}
        shapes |= {f"{layer}.mlp.down_proj": (hidden_size, width)}
    noise = torch.Generator().manual_seed(0)
    weights = {f"{name}.weight": torch.randn(shape, generator=noise) * 0.3 for name, shape in shapes.items()}
    norms = ["model.norm"]
    norms += [f"model.layers.{i}.{name}_layernorm" for i in range(2) for name in ("input", "post_attention")]
    weights |= {f"{name}.weight": 1 + torch.randn(hidden_size, generator=noise) * 0.2 for name in norms}
    save_byte_level(path, adds_bos, LLAMA3_TEMPLATE)
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    (path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return path


def write_jsonl(path: Path, rows: Sequence[Mapping[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def write_parquet(path: Path, rows: Sequence[Mapping[str, Any]], schema: pa.Schema | None = None) -> Path:
    pq.write_table(pa.Table.from_pylist(list(rows), schema), path)
    return path


def arguments(model: Path, *options: object) -> list[str]:
    return ["run", "--model", str(model), "--threads", "1", "--dtype", "fp32", *map(str, options)]


def call(model: Path, *options: object) -> int:
    """The exit code of `batchinfer run` in this process."""
    return command_line._run(arguments(model, *options))


def start(model: Path, *options: object, prelude: str = "", **popen: Any) -> "subprocess.Popen[str]":
    """`batchinfer run` in a process of its own. prelude: Python that it executes first."""
    script = f"import sys\n{prelude}\nfrom batchinfer.cli.main import main\nmain()"
    return subprocess.Popen(
        [sys.executable, "-c", script, *arguments(model, *options)],
        env={**os.environ, "OMP_WAIT_POLICY": "PASSIVE"},
        text=True,
        **({"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | popen),
    )


def read_rows(output: Path) -> list[dict[str, Any]]:
    if output.suffix == ".jsonl":
        return [json.loads(line) for line in output.read_text(encoding="utf-8").splitlines()]
    paths = sorted(output.glob("part-*.parquet")) if output.is_dir() else [output]
    return [row for path in paths for row in pq.read_table(path).to_pylist()]


def without_times(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    return [{name: value for name, value in row.items() if name not in TIMES} for row in rows]
