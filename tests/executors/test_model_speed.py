"""The speed of models with weights drawn at random: the roofline against published arithmetic, and a run on the CPU."""

import json
import time

import numpy as np
import pytest
import torch

from batchinfer.cli.main import main
from batchinfer.data.byte_tokenizer import ByteTokenizer
from batchinfer.errors import UsageError
from batchinfer.executors.device_profile import _product, measure_peaks
from batchinfer.executors.model_speed import Counts, Roofs, Workload, measure_model, roofline_seconds, speed_config
from batchinfer.models.step_work import StepWork
from batchinfer.roofline import DevicePeaks

H200 = DevicePeaks(4.8e12, 989e12, "datasheet", "2026-01-01", 0)
ROOFS = Roofs.of(H200, H200, "auto")
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
    assert outputs / roofline_seconds(LLAMA, ROOFS, counts) == pytest.approx(expected, rel=0.04)


def test_a_step_of_few_sequences_takes_as_long_as_reading_the_weights():
    assert roofline_seconds(LLAMA, ROOFS, Counts(10, 10, 10, 10, 0, 0)) == pytest.approx(10 * 5e9 / 4.8e12)


@pytest.mark.parametrize(("activation_dtype", "head_rate"), [("fp8", 1e12), ("int8", 4e12)])
def test_products_of_8_bits_have_a_roof_of_their_own(activation_dtype, head_rate):
    """fp8 leaves the head in 16 bits; attention's products are in 16 bits always."""
    wide, narrow = (DevicePeaks(bandwidth, rate, "", "", 0) for bandwidth, rate in ((1e12, 1e12), (9e12, 4e12)))
    work = StepWork(
        weight_bytes=0,
        kv_bytes_per_token=0,
        linear_flops_per_token=10**9,
        logits_flops_per_token=10**10,
        attention_flops_per_pair=10**6,
        dtype="bf16",
    )
    counts = Counts(1, 1, scheduled_tokens=100, sampled_tokens=7, context_tokens=50, query_key_pairs=3000)
    expected = 100e9 / 4e12 + 7e10 / head_rate + 3e9 / 1e12
    assert roofline_seconds(work, Roofs.of(wide, narrow, activation_dtype), counts) == pytest.approx(expected)


@pytest.mark.parametrize("dtype", ["int8", "fp8", "bf16"])
def test_the_product_that_is_timed_is_one(dtype):
    values = torch.rand(32, 32, generator=torch.Generator().manual_seed(0))
    scale = 127 if dtype == "int8" else 1
    product = _product(values, dtype)().double() / scale**2
    torch.testing.assert_close(product, values.double() @ values.double().T, rtol=0.02, atol=0.05)


def test_peaks_are_measured_for_each_kind_of_product(monkeypatch):
    monkeypatch.setattr("batchinfer.executors.device_profile._MATMUL_SIZE", {"cpu": 128})
    monkeypatch.setattr("batchinfer.executors.device_profile._COPY_BYTES", 1 << 20)
    found = {dtype: measure_peaks("cpu", dtype, 1) for dtype in ("int8", "fp8")}
    for dtype, peaks in found.items():
        assert peaks.measured_on.endswith(f", {dtype}, 1 thread")
        assert peaks.threads == 1
        assert peaks.flops_per_s > 0


def test_integer_activations_are_held_against_integer_products(monkeypatch):
    asked = []

    def peaks(device, dtype, threads):
        asked.append((dtype, threads))
        return DevicePeaks(1e10, {"bf16": 1e11, "int8": 3e11}[dtype], dtype, "", 1)

    monkeypatch.setattr("batchinfer.executors.model_speed.measure_peaks", peaks)
    config = speed_config({"device": "cpu", "max_num_seqs": 2, "activation_dtype": "int8", "threads": 1})
    lines = []
    (figures,) = measure_model("tiny", [Workload(5, 4)], config, 0.05, lines.append)
    assert asked == [("bf16", 1), ("int8", 1)]
    assert sum(line.startswith("peaks: 10 GB/s, ") for line in lines) == 2
    assert 0 < figures["share_of_roofline"] < 1
    assert (figures["aim"], figures["reached"]) == (None, None)  # which is a GPU's


def test_a_workload_that_cannot_begin_in_time_is_left_out():
    config = speed_config({"device": "cpu", "max_num_seqs": 3})
    lines = []
    loads = [Workload(3000, 900), Workload(5, 4)]
    assert list(measure_model("tiny", loads, config, 0.5, lines.append, end=time.monotonic())) == []
    assert [line.partition(":")[0] for line in lines if "left out" in line] == ["3000/900", "5/4"]


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
