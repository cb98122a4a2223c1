"""AWQ checkpoints that say float16, as most do, over whole jobs: activations past its range do no harm by default, and
end their rows where a person insists on float16."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_jobs import call, read_rows, save_tiny_model, write_jsonl

from batchinfer.conversion.options import QuantizeOptions
from batchinfer.conversion.quantize_job import quantize_model

MAX_TOKENS = 6
GROUP = 32  # divides the widths of both models
ROWS = [{"prompt": text, "max_tokens": MAX_TOKENS} for text in ("short", "abcdefgh" * 25, "a third")]


def awq_in_float16(original, path):
    """Rounded to nearest and written as AWQ does; config.json says float16."""
    quantize_model(str(original), str(path), QuantizeOptions(method="rtn", format="awq", group_size=GROUP), print)
    config = json.loads((path / "config.json").read_text())
    config |= {"torch_dtype": "float16"}
    config.pop("dtype", None)
    (path / "config.json").write_text(json.dumps(config))
    return path


@pytest.fixture(scope="module")
def overflowing(tmp_path_factory):
    """The first layer's MLP puts out more than 65,504, as it is in models that were trained in bfloat16."""
    folder = tmp_path_factory.mktemp("overflowing")
    path = awq_in_float16(save_tiny_model(folder / "plain"), folder / "awq")
    tensors = load_file(path / "model.safetensors")
    for name in ("gate_proj", "up_proj", "down_proj"):
        tensors[f"model.layers.0.mlp.{name}.scales"] *= 60
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return path


@pytest.mark.parametrize("dtype", ["auto", "bf16", "fp16"])
def test_rows_are_answered_or_fail_loudly(overflowing, tmp_path, dtype):
    rows = write_jsonl(tmp_path / "in.jsonl", ROWS)
    options = ["--input", rows, "--output", tmp_path / "out", "--temperature", 0, "--ignore-eos", "--dtype", dtype]
    call(overflowing, *options)
    found = read_rows(tmp_path / "out")
    if dtype == "fp16":
        assert [(row["finish_reason"], row["error_code"]) for row in found] == [("error", "numerical")] * len(ROWS)
        assert all(row["completion"] is None for row in found)
        return
    assert [row["finish_reason"] for row in found] == ["length"] * len(ROWS)
    assert [row["completion_tokens"] for row in found] == [MAX_TOKENS] * len(ROWS)


@pytest.mark.slow
def test_the_default_model_in_awq_and_float16_stays_finite_over_a_long_prompt(smollm2, tmp_path):
    """Held against the same numbers in float32."""
    from tiny_models import Runner

    from batchinfer.models.loader import load_decoder

    path = awq_in_float16(smollm2, tmp_path / "awq")
    ids = torch.randint(0, 40_000, (1500,), generator=torch.Generator().manual_seed(0))
    logprobs = [
        Runner(load_decoder(path, dtype), block_size=16).logits("a", ids, [len(ids)]).double().log_softmax(-1)
        for dtype in ("fp16", "auto", "fp32")
    ]
    exact = logprobs[2]
    for found, bound in zip(logprobs[:2], (1e-3, 2e-2), strict=True):
        assert found.isfinite().all()
        assert (exact.exp() * (exact - found)).sum(-1).mean() < bound
