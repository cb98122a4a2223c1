"""Finished outputs written by hand, of rows and figures that a test chooses."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from batchinfer.data.result_schema import result_schema

DISTRIBUTION = {"mean": 900.0, "p50": 850.0, "p90": 1500.0, "p99": 2100.0, "max": 2200.0}
NOTHING = dict.fromkeys(("mean", "p50", "p90", "p99", "max"))
TIMELINE: dict[str, list[float]] = {
    "end_s": [1.0, 2.0, 4.0],
    "steps": [1, 1, 2],
    "scheduled_tokens": [400, 12, 20],
    "output_tokens": [8, 12, 20],
    "prompt_tokens": [500, 100, 0],
    "cached_prompt_tokens": [100, 50, 0],
    "preemptions": [0, 2, 0],
    "context_tokens": [500, 620, 1300],
    "query_key_pairs": [100000, 700, 1300],
    "running_mean": [8.0, 12.0, 10.0],
    "waiting_mean": [4.0, 0.0, 0.0],
    "kv_blocks_mean": [40.0, 60.0, 55.0],
    "running_peak": [8, 12, 11],
    "kv_blocks_peak": [40, 60, 57],
}
WORK = {
    "steps": 4,
    "scheduled_tokens": 432,
    "context_tokens": 2420.0,
    "query_key_pairs": 102000.0,
    "logits_tokens": 40,
    "weight_bytes": 1_000_000_000,
    "kv_bytes_per_token": 50_000,
    "linear_flops_per_token": 2_000_000_000,
    "logits_flops_per_token": 100_000_000,
    "attention_flops_per_pair": 200_000,
    "dtype": "bf16",
}


def make_stats(**changes: Any) -> dict[str, Any]:
    """Figures of a run of 12 rows, of which 2 failed."""
    stats = {
        "rows": 12,
        "completions": 12,
        "finish_reasons": {"stop": 3, "length": 7, "error": 2},
        "errors_by_code": {"null_prompt": 2},
        "prompt_tokens": 123_456,
        "cached_prompt_tokens": 30_864,
        "completion_tokens": 7_890,
        "preemptions": 2,
        **dict.fromkeys(("queue_ms", "ttft_ms", "tbt_mean_ms", "tbt_max_ms", "latency_ms", "tbt_ms"), DISTRIBUTION),
        "rows_resumed": 0,
        "output_tokens_per_s": 1972.5,
        "total_tokens_per_s": 32836.5,
        "wall_seconds": {"input": 0.5, "model": 2.5, "inference": 4.0, "output": 0.25},
        "busy_seconds": 4.0,
        "engine_seconds": {"schedule": 0.1, "forward": 3.0, "sample": 0.2, "postprocess": 0.3},
        "steps": 4,
        "batch_size": {"mean": 10.0, "peak": 12},
        "kv_blocks": {"total": 80, "peak": 60, "mean": 52.5},
        "work": WORK,
        "kv_cache_bytes": 96 * 2**20,
        "peak_memory_bytes": 3 * 2**29,
        "device": "cpu",
        "machine": "a processor of no maker",
        "ended_at": "2026-01-31T07:08:09+00:00",
        "versions": {"python": "3.11", "batchinfer": "0.1.0"},
        "options": {
            "model": {"value": "models/small", "source": "flag"},
            "max_num_seqs": {"value": 16, "source": "default"},
            "stop": {"value": ["<end>", "\n"], "source": "job file"},
            "kv_cache_memory": {"value": 24 << 20, "source": "flag"},
            "deadline": {"value": 5400.0, "source": "flag"},
        },
        "timeline": TIMELINE,
    }
    return {**stats, **changes}


def make_rows(count: int = 10, failed: int = 2, prefix: str = "", **changes: Any) -> list[dict[str, Any]]:
    """Answered rows and then failed ones; answered row k takes (k + 1) seconds."""
    rows = []
    for number in range(count + failed):
        result: dict[str, Any] = dict.fromkeys(result_schema().names)
        result |= {"request_id": f"0-{number}-0", "sample_index": 0}
        if number >= count:
            result |= {"finish_reason": "error", "error_code": "null_prompt", "error_message": f"row {number} is null"}
        else:
            seconds = 1e3 * (number + 1)
            times = {"queue_ms": seconds / 4, "prefill_ms": seconds / 4, "ttft_ms": seconds / 2, "latency_ms": seconds}
            gaps = dict.fromkeys(("tbt_mean_ms", "tbt_p50_ms", "tbt_p99_ms", "tbt_max_ms"), seconds / 20)
            counts = {"prompt_tokens": 1000 + number, "cached_prompt_tokens": 16, "completion_tokens": 10}
            result |= {"completion": "x", "finish_reason": "length", "num_preemptions": 0, **counts, **times, **gaps}
        named = {prefix + name: value for name, value in {**result, **changes}.items()}
        rows.append({"id": f"row-{number}", **named})
    return rows


def write_job(
    root: Path, rows: list[dict[str, Any]], stats: dict[str, Any], name: str = "job.completions", prefix: str = ""
) -> Path:
    """A finished output at root / name: a directory with one part for each 7 rows, or a single file."""
    target = root / name
    fields = [pa.field("id", pa.string()), *result_schema(prefix)]
    table = pa.Table.from_pylist(rows, pa.schema(fields))
    if name.endswith(".parquet"):
        pq.write_table(table, target)
        _finish(root, [target], stats, f"{name}.manifest.json", f"{name}.stats.json")
    elif name.endswith(".jsonl"):
        target.write_text("".join(json.dumps(row) + "\n" for row in rows))
        _finish(root, [target], stats, f"{name}.manifest.json", f"{name}.stats.json")
    else:
        target.mkdir()
        parts = [target / f"part-{place:05d}.parquet" for place in range(-(-len(rows) // 7))]
        for place, part in enumerate(parts):
            pq.write_table(table.slice(7 * place, 7), part)
        _finish(target, parts, stats, "_manifest.json", "_stats.json")
        (target / "_SUCCESS").touch()
    return target


def _finish(root: Path, parts: list[Path], stats: dict[str, Any], manifest_name: str, stats_name: str) -> None:
    records = [{"name": part.name, "shard": 0, "num_rows": 1, "num_bytes": part.stat().st_size} for part in parts]
    manifest = {
        "shards": [{"uri": "/data/in & out.jsonl", "num_rows": 12, "fingerprint": "blake2b-0"}],
        "model": "sha",
        "options": {},
        "job_id": "0" * 32,
        "format": 1,
        "parts": records,
        "kept": {},
    }
    (root / manifest_name).write_text(json.dumps(manifest))
    (root / stats_name).write_text(json.dumps(stats))
