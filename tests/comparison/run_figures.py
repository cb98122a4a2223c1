"""Figures in bench throughput's form, for tests that need no model."""

from typing import Any


def figures(speed: float = 100.0, completion_tokens: int = 60, **more: Any) -> dict[str, Any]:
    latencies = {"mean": 1.0, "p50": 20.0, "p90": 30.0, "p99": 40.0, "max": 50.0}
    return {
        "rows": 3,
        "prompt_tokens": 30,
        "cached_prompt_tokens": 0,
        "completion_tokens": completion_tokens,
        "finish_reasons": {"stop": 0, "length": 3, "error": 0},
        "preemptions": 0,
        "recomputed_tokens": 0,
        "output_tokens_per_s": speed,
        "ttft_ms": dict(latencies),
        "tbt_ms": dict(latencies),
        "batch_size": {"mean": 2.5, "peak": 3},
        "kv_blocks": {"total": 40, "peak": 10, "mean": 5.0},
        "kv_cache_bytes": 40 * 2**20,
        "peak_memory_bytes": 512 * 2**20,
        "device": "cpu",
        "versions": {"batchinfer": "0"},
        "options": {"seed": {"value": 0, "source": "default"}},
    } | more
