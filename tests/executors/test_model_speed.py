"""The speed of models with weights drawn at random: the roofline against published arithmetic, and a run on the CPU."""

import json

import numpy as np
import pytest

from batchinfer.cli.main import main
from batchinfer.data.byte_tokenizer import ByteTokenizer
from batchinfer.errors import UsageError
from batchinfer.executors.model_speed import Counts, Workload, roofline_seconds
from batchinfer.models.step_work import StepWork
from batchinfer.roofline import DevicePeaks

H200 = DevicePeaks(4.8e12, 989e12, "datasheet", "2026-01-01")
# Llama-3.1-8B with 4-bit weights and an fp8 cache: 128 KiB a token in 16 bits, 6.98e9 parameters in the layers.
LLAMA = StepWork(
    weight_bytes=5_000_000_000,
    kv_bytes_per_token=64 << 10,
    linear_flops_per_token=2 * 6_979_321_856,
    logits_flops_per_token=2 * 4096 * 128256,
    attention_flops_per_pair=4 * 32 * 4096,
    dtype="bf16",
)


@pytest.mark.parametrize(
    ("inputs", "outputs", "expected"), [(128, 2048, 31_500), (1000, 1000, 20_000), (2048, 128, 3_590)]
)
def test_the_roofline_is_that_of_large_batches(inputs, outputs, expected):
    """1 / (KV bytes / bandwidth + FLOPs / peak), with the weights' bytes left out, worked out by hand."""
    pairs = inputs * inputs / 2 + outputs * (inputs + outputs / 2)
    counts = Counts(0, 0, inputs + outputs, outputs, outputs * (inputs + outputs / 2), pairs)
    assert outputs / roofline_seconds(LLAMA, H200, counts) == pytest.approx(expected, rel=0.04)


def test_a_step_of_few_sequences_takes_as_long_as_reading_the_weights():
    assert roofline_seconds(LLAMA, H200, Counts(10, 10, 10, 10, 0, 0)) == pytest.approx(10 * 5e9 / 4.8e12)


def test_a_run_on_the_cpu(tmp_path, capsys):
    file = tmp_path / "figures.json"
    sizes = ["--shape", "tiny", "--workload", "20/6", "--workload", "5/10", "--num-seqs", "6", "--seconds", "0.2"]
    with pytest.raises(SystemExit) as ended:
        main(["bench", "model", *sizes, "--device", "cpu", "--json", str(file)])
    assert ended.value.code == 0
    lines, found = capsys.readouterr().out.splitlines(), json.loads(file.read_text())
    assert [(f["num_inputs"], f["num_outputs"]) for f in found] == [(20, 6), (5, 10)]
    for line, figures in zip(lines, found, strict=True):
        assert f"{figures['num_inputs']}/{figures['num_outputs']}: " in line
        assert figures["seconds"] >= 0.2
        assert 4 < figures["num_seqs"] <= 6
        assert 0 < figures["share_of_roofline"] < 1
        share = figures["output_tokens_per_s"] / figures["roofline_tokens_per_s"]
        assert share == pytest.approx(figures["share_of_roofline"])
        # each sequence gets a token in almost each step; whoever ended starts again in the next
        assert figures["output_tokens_per_s"] * figures["seconds"] > 0.7 * 4 * figures["steps"]


@pytest.mark.parametrize("text", ["1000", "a/5", "0/5", "5/1"])
def test_workloads_that_are_none(text):
    with pytest.raises(UsageError, match="must be as 1000/1000"):
        Workload.parse(text)


def test_text_without_a_tokenizer_is_its_bytes():
    tokenizer = ByteTokenizer(100)
    (ids,) = tokenizer.encode_batch(["aü"])
    assert ids.dtype == np.int32
    assert ids.tolist() == [97, 0xC3 - 100, 0xBC - 100]
    assert tokenizer.decode([72, 105, 99]) == "Hic"
    assert ByteTokenizer(1000).decode([72, 300, 105]) == "Hi"
    with pytest.raises(UsageError, match="no tokenizer"):
        tokenizer.require_chat_template()
