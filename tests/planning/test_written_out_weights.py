"""What a plan for a GPU allows for quantised weights that are written out for many rows."""

from types import SimpleNamespace

import pytest

from batchinfer.config import JobConfig
from batchinfer.planning.model_facts import ModelFacts

LLAMA = SimpleNamespace(hidden_size=4096, intermediate_size=14336, num_q_heads=32, num_kv_heads=8, head_dim=128)
WIDE_HEADS = SimpleNamespace(hidden_size=64, intermediate_size=64, num_q_heads=8, num_kv_heads=8, head_dim=64)


@pytest.mark.parametrize(
    ("spec", "device", "method", "options", "expected"),
    [
        (LLAMA, "cuda", "awq", {}, 2 * 28672 * 4096),
        (WIDE_HEADS, "cuda", "gptq", {}, 2 * 24 * 64 * 64),
        (LLAMA, "cpu", "awq", {}, 0),
        (LLAMA, "cuda", "none", {}, 0),
        (LLAMA, "cuda", "awq", {"activation_dtype": "fp8"}, 0),
    ],
)
def test_the_largest_projection_is_written_out(spec, device, method, options, expected):
    facts = SimpleNamespace(spec=spec, device=device, method=method, dtype="bf16")
    assert ModelFacts.scratch_bytes(facts, JobConfig.from_options(options)) == expected
