"""How fast a model with weights drawn at random answers, beside what the device's peaks allow. Called by `bench
model`."""

import json
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from batchinfer.config import JobConfig
from batchinfer.engine.engine import Engine
from batchinfer.errors import BatchInferError, UsageError
from batchinfer.executors.device_profile import measure_peaks
from batchinfer.executors.local import build_engine, load_model, prepare_kernels
from batchinfer.models.resolve import resolve_model
from batchinfer.models.step_work import StepWork
from batchinfer.request import Request, RequestId, SamplingParams
from batchinfer.roofline import DevicePeaks

_AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm", "zero_point": True}
_LLAMA = {"model_type": "llama", "torch_dtype": "float16", "rms_norm_eps": 1e-5, "quantization_config": _AWQ}
SHAPES: Mapping[str, Mapping[str, Any]] = {
    "llama-3.1-8b": _LLAMA
    | {"vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32}
    | {"num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 131072, "rope_theta": 5e5},
    "tiny": _LLAMA
    | {"vocab_size": 512, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2}
    | {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 4096},
}


@dataclass(frozen=True, slots=True)
class Workload:
    """Prompts of num_inputs tokens, and num_outputs tokens for each."""

    num_inputs: int
    num_outputs: int

    @classmethod
    def parse(cls, text: str) -> "Workload":
        """Of "1000/1000". Raises UsageError."""
        inputs, _, outputs = text.partition("/")
        if not (inputs.isdigit() and outputs.isdigit() and int(inputs) and int(outputs) > 1):
            raise UsageError(f"--workload {text}: must be as 1000/1000, tokens of prompt and answer")
        return cls(int(inputs), int(outputs))


def measure_model(
    shape: str,
    workloads: Sequence[Workload],
    config: JobConfig,
    seconds: float,
    report: Callable[[str], None],
) -> Iterator[dict[str, Any]]:
    """For each workload its figures: num_inputs, num_outputs, num_seqs that ran at once in the mean,
    output_tokens_per_s, roofline_tokens_per_s (of the same work at the device's peaks), share_of_roofline, and the
    steps and seconds measured.

    config: of a job; its model and load format are replaced. Each workload is measured for `seconds` in its steady
    state: it begins with sequences of which as many are near their end as near their beginning, computed before, and
    whoever ends is replaced. Raises BatchInferError as a job does.
    """
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "config.json").write_text(json.dumps(SHAPES[shape]), encoding="utf-8")
        longest = max(load.num_inputs + load.num_outputs for load in workloads)
        config = replace(
            config,
            model=replace(config.model, model=directory, load_format="dummy", max_model_len=longest),
            cache=replace(config.cache, enable_prefix_caching=False),
        )
        prepare_kernels(config, report)
        files = resolve_model(directory, report, load_format="dummy")
        local = build_engine(config, load_model(config, files, report), report)
    peaks = measure_peaks(local.device, local.work.dtype)
    report(f"peaks: {peaks.bytes_per_s / 1e9:,.0f} GB/s, {peaks.flops_per_s / 1e9:,.0f} GFLOP/s ({peaks.measured_on})")
    for load in workloads:
        yield _measure(local.engine, local.work, peaks, load, config.scheduler.max_num_seqs, seconds)


@dataclass(frozen=True, slots=True)
class Counts:
    """What steps did, as EngineStats counts it."""

    steps: int
    sum_batch_size: int
    scheduled_tokens: int
    sampled_tokens: int
    context_tokens: float
    query_key_pairs: float

    @classmethod
    def of(cls, engine: Engine) -> "Counts":
        return cls(*(getattr(engine.stats, member.name) for member in fields(cls)))

    def since(self, before: "Counts") -> "Counts":
        return Counts(*(now - then for now, then in zip(astuple(self), astuple(before), strict=True)))


def roofline_seconds(work: StepWork, peaks: DevicePeaks, counts: Counts) -> float:
    """The least time that the device's peaks allow for steps: weights are read while their products run, and the cache
    while attention's do, but the two follow each other."""
    linear_flops = work.linear_flops_per_token * counts.scheduled_tokens
    linear_flops += work.logits_flops_per_token * counts.sampled_tokens
    attention_flops = work.attention_flops_per_pair * counts.query_key_pairs
    linear_s = max(counts.steps * work.weight_bytes / peaks.bytes_per_s, linear_flops / peaks.flops_per_s)
    cache_bytes = work.kv_bytes_per_token * counts.context_tokens
    return linear_s + max(cache_bytes / peaks.bytes_per_s, attention_flops / peaks.flops_per_s)


def _measure(
    engine: Engine, work: StepWork, peaks: DevicePeaks, load: Workload, num_seqs: int, seconds: float
) -> dict[str, Any]:
    rows = _Rows(engine, load)
    for place in range(num_seqs):
        rows.add(num_done=load.num_outputs * place // num_seqs)
    while rows.num_added - engine.num_waiting < num_seqs:  # until those of the beginning have started
        rows.step()
    before, start = Counts.of(engine), time.perf_counter()
    while time.perf_counter() - start < seconds or engine.stats.steps == before.steps:
        rows.step()
    elapsed, counts = time.perf_counter() - start, Counts.of(engine).since(before)
    engine.abandon()
    least_s = roofline_seconds(work, peaks, counts)
    return {
        "num_inputs": load.num_inputs,
        "num_outputs": load.num_outputs,
        "num_seqs": counts.sum_batch_size / counts.steps,
        "output_tokens_per_s": counts.sampled_tokens / elapsed,
        "roofline_tokens_per_s": counts.sampled_tokens / least_s,
        "share_of_roofline": least_s / elapsed,
        "steps": counts.steps,
        "seconds": elapsed,
    }


class _Rows:
    """Requests of one workload, of tokens drawn at random."""

    def __init__(self, engine: Engine, load: Workload) -> None:
        self._engine = engine
        self._load = load
        self._rng = np.random.default_rng(0)
        self.num_added = 0

    def add(self, num_done: int = 0) -> None:
        """num_done: tokens of the answer that count as given: they stand in the prompt."""
        num_inputs, num_outputs = self._load.num_inputs + num_done, self._load.num_outputs - num_done
        prompt = self._rng.integers(0, self._engine.vocab_size, num_inputs, np.int32)
        params = SamplingParams(max_tokens=num_outputs, temperature=0.0, ignore_eos=True)
        self._engine.add(Request(RequestId(0, self.num_added), prompt, params, num_outputs, noise_key=0))
        self.num_added += 1

    def step(self) -> None:
        """One step of the engine, and a new request for each that it finished. Raises BatchInferError for one that
        failed, whose rows would be no measure."""
        for result in self._engine.step():
            if result.error_code is not None:
                raise BatchInferError(f"a row failed: {result.error_message}")
            self.add()


def figures_line(figures: Mapping[str, Any]) -> str:
    """A workload's figures to read."""
    return (
        f"{figures['num_inputs']}/{figures['num_outputs']}: {figures['output_tokens_per_s']:,.0f} output tokens/s, "
        f"{figures['share_of_roofline']:.0%} of the roofline's {figures['roofline_tokens_per_s']:,.0f}, with "
        f"{figures['num_seqs']:.0f} sequences at once ({figures['steps']} steps in {figures['seconds']:.1f} s)"
    )
