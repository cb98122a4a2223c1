"""How fast a model with weights drawn at random answers, beside what the device's peaks allow. Called by `bench model`
and device_part.py."""

import json
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from batchinfer.config import JobConfig, ModelConfig
from batchinfer.engine.engine import Engine
from batchinfer.errors import BatchInferError, UsageError
from batchinfer.executors.aims import MODEL_SHARE, verdict
from batchinfer.executors.device_profile import measure_peaks
from batchinfer.executors.local import LocalEngine, build_engine, load_model, prepare_kernels
from batchinfer.models.resolve import resolve_model
from batchinfer.models.step_work import StepWork
from batchinfer.request import Request, RequestId, SamplingParams
from batchinfer.roofline import DevicePeaks

_LEAST_S = 3.0  # that a workload is measured for, unless less is asked for
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

    def __str__(self) -> str:
        return f"{self.num_inputs}/{self.num_outputs}"

    @classmethod
    def parse(cls, text: str) -> "Workload":
        """Of "1000/1000". Raises UsageError."""
        inputs, _, outputs = text.partition("/")
        if not (inputs.isdigit() and outputs.isdigit() and int(inputs) and int(outputs) > 1):
            raise UsageError(f"--workload {text}: must be as 1000/1000, tokens of prompt and answer")
        return cls(int(inputs), int(outputs))


def speed_config(given: Mapping[str, Any]) -> JobConfig:
    """The configuration of a measurement. given: options of run, over those that it takes by itself: an fp8 cache, and
    as many sequences as are asked for. Raises ValueError as JobConfig does."""
    return JobConfig.from_options({"kv_cache_dtype": "fp8", "admission": "greedy", **given})


def measure_model(
    shape: str,
    workloads: Sequence[Workload],
    config: JobConfig,
    seconds: float,
    report: Callable[[str], None],
    end: float | None = None,
) -> Iterator[dict[str, Any]]:
    """For each workload its figures: num_inputs, num_outputs, num_seqs that ran at once in the mean,
    output_tokens_per_s, roofline_tokens_per_s (of the same work at the device's peaks), share_of_roofline, the `aim` of
    it and whether that is `reached` (None on a CPU), the steps and seconds measured.

    config: of a job; its model and load format are replaced. Each workload is measured for `seconds` in its steady
    state: it begins with sequences of which as many are near their end as near their beginning, computed before, and
    whoever ends is replaced. end: of time.monotonic; each workload takes an equal share of what is left until then, and
    is left out where that does not suffice to begin. Raises BatchInferError as a job does.
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
    roofs = _measure_roofs(local, config.model, report)
    for place, load in enumerate(workloads):
        now = time.monotonic()
        own_end = None if end is None else now + (end - now) / (len(workloads) - place)
        found = _measure(local, roofs, load, config.scheduler.max_num_seqs, seconds, own_end)
        if found is None:
            report(f"{load}: left out: the time was over before all sequences had begun")
        else:
            yield found


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


@dataclass(frozen=True, slots=True)
class Roofs:
    """A device's bytes a second and floating-point operations a second, of the products of layers, head and
    attention."""

    bytes_per_s: float
    linear_flops_per_s: float
    head_flops_per_s: float
    attention_flops_per_s: float

    @classmethod
    def of(cls, wide: DevicePeaks, linear: DevicePeaks, activation_dtype: str) -> "Roofs":
        """wide: of the precision of weights and activations; linear: of what the layers' products run in. The head's
        run in that too but with fp8."""
        head = wide if activation_dtype == "fp8" else linear
        return cls(wide.bytes_per_s, linear.flops_per_s, head.flops_per_s, wide.flops_per_s)


def _measure_roofs(local: LocalEngine, options: ModelConfig, report: Callable[[str], None]) -> Roofs:
    activation_dtype, threads = options.activation_dtype, options.threads
    wide = measure_peaks(local.device, local.work.dtype, threads)
    linear = wide if activation_dtype == "auto" else measure_peaks(local.device, activation_dtype, threads)
    for peaks in dict.fromkeys((wide, linear)):
        figures = f"{peaks.bytes_per_s / 1e9:,.0f} GB/s, {peaks.flops_per_s / 1e9:,.0f} GFLOP/s"
        report(f"peaks: {figures} ({peaks.measured_on})")
    return Roofs.of(wide, linear, activation_dtype)


def roofline_seconds(work: StepWork, roofs: Roofs, counts: Counts) -> float:
    """The least time that the device's peaks allow for steps: weights are read while their products run, and the cache
    while attention's do, but the two follow each other."""
    products_s = work.linear_flops_per_token * counts.scheduled_tokens / roofs.linear_flops_per_s
    products_s += work.logits_flops_per_token * counts.sampled_tokens / roofs.head_flops_per_s
    attention_s = work.attention_flops_per_pair * counts.query_key_pairs / roofs.attention_flops_per_s
    weights_s = counts.steps * work.weight_bytes / roofs.bytes_per_s
    cache_s = work.kv_bytes_per_token * counts.context_tokens / roofs.bytes_per_s
    return max(weights_s, products_s) + max(cache_s, attention_s)


def _measure(
    local: LocalEngine, roofs: Roofs, load: Workload, num_seqs: int, seconds: float, end: float | None
) -> dict[str, Any] | None:
    """None where the sequences cannot all begin before `end`, of time.monotonic."""
    engine, rows = local.engine, _Rows(local.engine, load)
    begun = rows.begin(num_seqs, None if end is None else end - min(seconds, _LEAST_S))
    before, start = Counts.of(engine), time.monotonic()
    stop = start + seconds if end is None else min(start + seconds, end)
    while begun and (time.monotonic() < stop or engine.stats.steps == before.steps):
        rows.step()
    elapsed, counts = time.monotonic() - start, Counts.of(engine).since(before)
    engine.abandon()
    return _figures(local, roofs, load, counts, elapsed) if begun else None


def _figures(local: LocalEngine, roofs: Roofs, load: Workload, counts: Counts, elapsed: float) -> dict[str, Any]:
    least_s = roofline_seconds(local.work, roofs, counts)
    aim = MODEL_SHARE if local.device == "cuda" else None
    return {
        "num_inputs": load.num_inputs,
        "num_outputs": load.num_outputs,
        "num_seqs": counts.sum_batch_size / counts.steps,
        "output_tokens_per_s": counts.sampled_tokens / elapsed,
        "roofline_tokens_per_s": counts.sampled_tokens / least_s,
        "share_of_roofline": least_s / elapsed,
        "aim": aim,
        "reached": None if aim is None else least_s / elapsed >= aim,
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

    def begin(self, num_seqs: int, end: float | None) -> bool:
        """Steps until so many sequences run, of which as many are near their end as near their beginning; False where
        that takes until `end`."""
        for place in range(num_seqs):
            self.add(num_done=self._load.num_outputs * place // num_seqs)
        while self.num_added - self._engine.num_waiting < num_seqs:
            if end is not None and time.monotonic() >= end:
                return False
            self.step()
        return True

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
        f"{figures['share_of_roofline']:.0%} of the roofline's {figures['roofline_tokens_per_s']:,.0f}"
        f"{verdict(figures['share_of_roofline'], figures['aim'])}, with "
        f"{figures['num_seqs']:.0f} sequences at once ({figures['steps']} steps in {figures['seconds']:.1f} s)"
    )
