"""Where the time of a prefill step and of a decode step goes, operation by operation. Called by `bench step`."""

import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count, islice
from statistics import mean, median
from types import CodeType, FrameType, TracebackType
from typing import Any

import numpy as np
import torch

from batchinfer.config import JobConfig
from batchinfer.engine.engine import Engine
from batchinfer.engine.sampler import SamplingPlan
from batchinfer.errors import UsageError
from batchinfer.executors.local import build_engine, load_model, prepare_kernels
from batchinfer.kernels.gated_activation import gated_activation
from batchinfer.kernels.kv_store import rotary_kv_store
from batchinfer.kernels.paged_attention import paged_attention
from batchinfer.kernels.rms_norm import add_rms_norm, rms_norm
from batchinfer.models import linear
from batchinfer.models.resolve import resolve_model
from batchinfer.request import Request, RequestId, SamplingParams

_STEPS = 7  # of each kind, and as many with the operations watched, by turns
_MATMUL = (256, 1536, 576)  # rows, inputs and outputs of the product that says how fast the machine multiplies
_OPERATIONS: Mapping[Any, str] = {
    paged_attention: "attention",
    rotary_kv_store: "rotary and kv_store",
    rms_norm: "norms",
    add_rms_norm: "norms",
    gated_activation: "gated activation",
    SamplingPlan.choose: "sampling",
} | {
    method: "matmul"
    for value in vars(linear).values()
    if isinstance(value, type) and value.__module__ == linear.__name__ and value is not linear.Projection
    for name, method in vars(value).items()
    if name in ("__call__", "fill", "gated")  # the last with the activation of the gate, which it computes at once
}


@dataclass(frozen=True, slots=True, kw_only=True)
class StepShape:
    """In a decode step num_seqs sequences of some `context` tokens get one token each; a prefill step computes
    prefill_tokens tokens of prompts of `context` tokens. Raises ValueError."""

    num_seqs: int
    context: int
    prefill_tokens: int

    def __post_init__(self) -> None:
        for name in ("num_seqs", "context", "prefill_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} = {getattr(self, name)}: must be 1 or more")
        if self.prefill_tokens < max(self.context, self.num_seqs + 1):
            raise ValueError(f"prefill_tokens = {self.prefill_tokens}: must be at least context, and above num_seqs")


def profile_steps(config: JobConfig, shape: StepShape, report: Callable[[str], None]) -> dict[str, Any]:
    """Runs steps of both kinds on the model of `config`, with tokens drawn at random and no prefix cache.

    Returns for `prefill` and for `decode`: num_tokens, step_ms (the median), and of other steps, whose operations are
    watched, watched_ms and operations_ms by name, which add up to it; `matmul` has the gated activation in it where the
    product computes it, and `rest` is what no operation took: Python, the scheduler, small tensor operations, and the
    watching. And matmul_gflops: what the machine reaches in the same run in a bf16 product of 256 x 1536 by 1536 x 576.
    Raises BatchInferError as a job does.
    """
    most_prompts = shape.prefill_tokens // shape.context + 2  # of which a prefill step computes some
    config = replace(
        config,
        cache=replace(config.cache, enable_prefix_caching=False),
        scheduler=replace(
            config.scheduler,
            max_num_seqs=max(shape.num_seqs, most_prompts),
            max_num_batched_tokens=shape.prefill_tokens,
        ),
    )
    prepare_kernels(config, report)
    model = load_model(config, resolve_model(config.model.model, report, config.model.quantization), report)
    steps = _Steps(build_engine(config, model, report, overlaps=False).engine, shape)
    figures = {"prefill": steps.prefill(), "decode": steps.decode()}
    return figures | {"matmul_gflops": _matmul_rate() / 1e9}


class _Steps:
    """Steps of both kinds on one engine."""

    def __init__(self, engine: Engine, shape: StepShape) -> None:
        self._engine = engine
        self._shape = shape
        self._rng = np.random.default_rng(0)
        self._rows = count()
        # While the last prompts are computed, the first ones decode already.
        prefill_steps = -(-shape.num_seqs * shape.context // (shape.prefill_tokens - shape.num_seqs))
        self._decoded = prefill_steps + 2 * _STEPS + 3
        if shape.context + self._decoded > engine.max_model_len:
            raise UsageError(
                f"--context {shape.context}: with the {self._decoded} tokens that are decoded it exceeds max_model_len "
                f"({engine.max_model_len})"
            )

    def prefill(self) -> dict[str, Any]:
        steps = 2 * _STEPS + 1
        self._add(-(-steps * self._shape.prefill_tokens // self._shape.context), max_tokens=1)
        self._engine.step()
        figures = _profile(self._engine.step, self._shape.prefill_tokens)
        self._engine.abandon()
        return figures

    def decode(self) -> dict[str, Any]:
        self._add(self._shape.num_seqs, self._decoded)
        stats, num_seqs = self._engine.stats, self._shape.num_seqs
        before = stats.sampled_tokens
        while stats.sampled_tokens - before < num_seqs:  # until each has its first token
            before = stats.sampled_tokens
            self._engine.step()
        figures = _profile(self._engine.step, num_seqs)
        self._engine.abandon()
        return figures

    def _add(self, num_prompts: int, max_tokens: int) -> None:
        params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
        for row in islice(self._rows, num_prompts):
            prompt = self._rng.integers(0, self._engine.vocab_size, self._shape.context, np.int32)
            self._engine.add(Request(RequestId(0, row), prompt, params, max_tokens, noise_key=0))


def _profile(step: Callable[[], object], num_tokens: int) -> dict[str, Any]:
    """step_ms from steps as they are; the operations from others, as watching them costs `rest` some milliseconds."""
    plain: list[float] = []
    watched: list[dict[str, float]] = []
    for _ in range(_STEPS):
        plain.append(_milliseconds(step))
        with OperationTimer(_OPERATIONS) as timer:
            whole = _milliseconds(step)
        times = timer.milliseconds
        watched.append({**times, "rest": whole - sum(times.values())})
    operations = _typical(watched)
    watched_ms = sum(operations.values())
    return {"num_tokens": num_tokens, "step_ms": median(plain), "watched_ms": watched_ms, "operations_ms": operations}


def _typical(steps: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Each operation's mean over the three steps in the middle by their whole time: the means of parts add up to that
    of the whole, which medians do not. steps: an odd number."""
    by_time = sorted(steps, key=lambda times: sum(times.values()))
    middle = len(by_time) // 2
    chosen = by_time[max(0, middle - 1) : middle + 2]
    return {name: mean(times[name] for times in chosen) for name in chosen[0]}


def _milliseconds(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return (time.perf_counter() - start) * 1e3


class OperationTimer:
    """Adds up, by name, the time within the functions that it watches; what they call of each other counts once.

    operations: functions and the names that they add to. A context manager; one at a time in a thread.
    """

    def __init__(self, operations: Mapping[Any, str]) -> None:
        self._names: dict[CodeType, str] = {function.__code__: name for function, name in operations.items()}
        self.milliseconds: dict[str, float] = defaultdict(float)
        self._running: FrameType | None = None
        self._start = 0.0

    def __enter__(self) -> "OperationTimer":
        sys.setprofile(self._on_event)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        sys.setprofile(None)

    def _on_event(self, frame: FrameType, event: str, _: object) -> None:
        if event == "call" and self._running is None and frame.f_code in self._names:
            self._running, self._start = frame, time.perf_counter()
        elif event == "return" and frame is self._running:
            self.milliseconds[self._names[frame.f_code]] += (time.perf_counter() - self._start) * 1e3
            self._running = None


def _matmul_rate() -> float:
    """Operations a second."""
    rows, inputs, outputs = _MATMUL
    x = torch.randn(rows, inputs, dtype=torch.bfloat16)
    weight = torch.randn(outputs, inputs, dtype=torch.bfloat16)
    product = linear.PackedLinear(weight) if linear.PackedLinear.is_best_for(weight) else linear.Linear(weight)

    def products() -> None:
        for _ in range(10):
            product(x)

    ms = median(_milliseconds(products) for _ in range(50)) / 10
    return 2.0 * rows * inputs * outputs / (ms / 1e3)


def step_table(figures: Mapping[str, Any]) -> str:
    """What profile_steps returns, as a table to read."""
    return "\n".join(_table_lines(figures))


def _table_lines(figures: Mapping[str, Any]) -> Iterator[str]:
    for kind in ("prefill", "decode"):
        step = figures[kind]
        watched_ms = step["watched_ms"]
        yield f"{kind} step of {step['num_tokens']:,} tokens: {step['step_ms']:.1f} ms"
        yield f"  while the operations are watched: {watched_ms:.1f} ms, of which"
        for name, ms in sorted(step["operations_ms"].items(), key=lambda item: -item[1]):
            yield f"    {name:20}{ms:9.1f} ms  {ms / watched_ms:6.1%}"
    yield f"bf16 product of 256 x 1536 by 1536 x 576: {figures['matmul_gflops']:.0f} GFLOP/s"
