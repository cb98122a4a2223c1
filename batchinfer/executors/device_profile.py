"""Measures a device and the steps of a model on it, for forecasts and reports, and keeps the figures in the machine's
profile. Called by planning/."""

import datetime
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np

from batchinfer.config import JobConfig, SchedulerConfig
from batchinfer.executors.local import build_engine, choose_device, load_model, prepare_kernels, usable_processors
from batchinfer.executors.step_fit import TimedStep, fit_step_times
from batchinfer.models.resolve import ModelFiles, resolve_model
from batchinfer.request import Request, RequestId, SamplingParams
from batchinfer.roofline import DevicePeaks, StepTimes, machine_name, save_peaks, save_step_times

if TYPE_CHECKING:
    import torch

    from batchinfer.engine.engine import Engine

_COPY_BYTES = 1 << 28
_MATMUL_SIZE = {"cpu": 1024, "cuda": 8192}
_REPEATS = 5
_MOST_TOKENS = 2048  # of a step, as --max-num-batched-tokens has it where nobody says otherwise
# Steps of whole prompts, as (tokens of the step, of each prompt); decode steps, as (sequences, tokens of each); and
# mixed ones, as (sequences that decode, prompt tokens beside them). The most telling ones first.
_SHAPES = (
    *(("decode", 32, 32), ("prompts", 2048, 64), ("prompts", 1024, 1023), ("decode", 4, 1023), ("prompts", 64, 63)),
    *(("decode", 1, 32), ("decode", 128, 16), ("prompts", 256, 64), ("mixed", 16, 448), ("prompts", 16, 15)),
    *(("decode", 8, 32), ("prompts", 512, 32), ("decode", 64, 16), ("prompts", 256, 255), ("decode", 16, 128)),
    *(("decode", 256, 8), ("mixed", 32, 128), ("prompts", 1024, 64), ("prompts", 2048, 1023)),
)
_ALWAYS = 8  # shapes that are timed however long they take
_SECONDS = 25.0  # after which no further shape is timed
# Of a decode shape, fewest and most: five of 20 ms would be of one moment, and others of the machine come and go.
_STEPS = (5, 20)
_DECODE_SECONDS = 0.6  # after which no more than the fewest are taken
_PROMPT_STEPS = 3  # of another one, and two where they are long
_LONG_TOKENS = 1024
_MIXED = (64, 64)  # tokens of each sequence that decodes, and of each prompt, in a mixed step


def profile_key(config: JobConfig, files: ModelFiles, device: str, dtype: str, kv_dtype: str) -> dict[str, Any]:
    """What decides how long a step takes. dtype, kv_dtype: what `auto` stands for."""
    return {
        "device": device,
        "threads": threads_of(config, device),
        "enforce_eager": device == "cuda" and config.model.enforce_eager,
        "model": files.fingerprint,
        "dtype": dtype,
        "activation_dtype": config.model.activation_dtype,
        "kv_cache_dtype": kv_dtype,
        "kv_cache_dtype_skip_layers": config.cache.kv_cache_dtype_skip_layers,
    }


def threads_of(config: JobConfig, device: str) -> int:
    """Of the CPU that the model runs on; 0 where it runs on a GPU."""
    return (config.model.threads or usable_processors()) if device == "cpu" else 0


def measure_peaks(device: str, dtype: str, threads: int | None = None) -> DevicePeaks:
    """About a second. Reads as a copy does, which moves each byte twice. dtype: of the product, as in "bf16", or int8,
    or fp8, which a CPU computes in float32. threads: of this process from now on, None for all that it may use."""
    import torch

    torch.set_num_threads(threads or usable_processors())
    source = torch.ones(_COPY_BYTES // 4, device=device)
    target = torch.empty_like(source)
    copy_s = _fastest(lambda: target.copy_(source), device)
    size = _MATMUL_SIZE[device]
    product_s = _fastest(_product(torch.rand(size, size, device=device), dtype), device)
    used = torch.get_num_threads() if device == "cpu" else 0
    rates = 2 * source.nbytes / copy_s, 2.0 * size**3 / product_s
    return DevicePeaks(*rates, _where(device, dtype, used), _today(), used)


def _where(device: str, dtype: str, threads: int) -> str:
    """The device in words, as in "AMD EPYC, bf16, 2 threads"."""
    used = f", {threads} thread{'s' if threads > 1 else ''}" if threads else ""
    return f"{machine_name(device)}, {dtype}{used}"


def _product(values: "torch.Tensor", dtype: str) -> Callable[[], object]:
    """The library's product of a matrix of numbers from 0 to 1 and its transpose."""
    import torch

    from batchinfer.cache.paged_kv import TORCH_DTYPES

    if dtype == "int8":
        integers = (values * 127).to(torch.int8)
        return lambda: torch._int_mm(integers, integers.T)
    if dtype == "fp8" and values.is_cuda:
        codes, one = values.to(torch.float8_e4m3fn), torch.ones((), device=values.device)
        return lambda: torch._scaled_mm(codes, codes.T, one, one, out_dtype=torch.bfloat16, use_fast_accum=True)
    left = values.to(torch.float32 if dtype == "fp8" else TORCH_DTYPES[dtype])
    return lambda: left @ left.T


def _fastest(run: Callable[[], object], device: str) -> float:
    """Seconds of the best of some runs."""
    import torch

    times = []
    for _ in range(_REPEATS):
        start = time.perf_counter()
        run()
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return min(times)


def calibrate(config: JobConfig, report: Callable[[str], None]) -> StepTimes:
    """Loads the model, times some steps, and keeps the fit and the device's peaks in the machine's profile, both
    with as many threads as the options give. Raises BatchInferError as a job does, and OSError where the profile cannot
    be written."""
    import torch

    device = choose_device(config.model.device, torch.cuda.is_available())
    config = replace(
        config,
        cache=replace(config.cache, enable_prefix_caching=False),
        scheduler=SchedulerConfig(max_num_seqs=256, max_num_batched_tokens=_MOST_TOKENS, admission="greedy"),
    )
    prepare_kernels(config, report)
    files = resolve_model(config.model.model, report, config.model.quantization, config.model.load_format)
    model = load_model(config, files, report)
    local = build_engine(config, model, report, overlaps=False)
    spec = model.decoder.kv_cache_spec(config.cache.block_size, config.cache.kv_cache_dtype)
    steps = list(_Steps(local.engine).timed())
    threads = threads_of(config, device)
    times = fit_step_times(steps, _where(device, spec.wide_dtype, threads), _today())
    save_peaks(device, spec.wide_dtype, measure_peaks(device, spec.wide_dtype, config.model.threads))
    save_step_times(profile_key(config, files, device, spec.wide_dtype, spec.dtype), times)
    report(f"{len(steps)} steps timed{_how_far_off(times, len(steps))}")
    return times


def _how_far_off(times: StepTimes, num_steps: int) -> str:
    unknowns = len(times.token_counts) + 3  # those of a sample, a cached token and a pair beside them
    if num_steps <= unknowns:
        return f", no more than the fit has unknowns ({unknowns}): how far it is off, they do not tell"
    return f"; the fit is off by {times.error:.1%} in the mean"


class _Steps:
    """Steps of several shapes on one engine, with tokens drawn at random."""

    def __init__(self, engine: "Engine") -> None:
        self._engine = engine
        self._rng = np.random.default_rng(0)
        self._row = 0
        self._end = time.monotonic() + _SECONDS

    def timed(self) -> Iterator[TimedStep]:
        """As many shapes as fit the time, the most telling ones first, cut to what the engine holds."""
        self._add(8, 3)  # the first steps of a process take longer
        while self._engine.has_unfinished:
            self._engine.step()
        for number, (kind, size, length) in enumerate(_SHAPES):
            if number < _ALWAYS or time.monotonic() < self._end:
                yield from getattr(self, f"_{kind}")(size, length)

    def _prompts(self, tokens: int, length: int) -> Iterator[TimedStep]:
        """The median of some steps of whole prompts."""
        length = min(length, self._engine.max_model_len - 1)
        yield self._median_beside(max(1, tokens // length), length)
        self._engine.abandon()

    def _mixed(self, batch: int, tokens: int) -> Iterator[TimedStep]:
        """Some sequences that decode, and the median of some steps in which prompts are computed beside them."""
        context, length = _MIXED
        if context + self._steps_to_start(batch, context) + _PROMPT_STEPS < self._engine.max_model_len:
            self._start(batch, context, _PROMPT_STEPS)
            yield self._median_beside(tokens // length, length)
            self._engine.abandon()

    def _median_beside(self, num_prompts: int, length: int) -> TimedStep:
        """Of steps that compute so many prompts of that length, beside what runs."""
        steps = []
        for _ in range(2 if num_prompts * length >= _LONG_TOKENS else _PROMPT_STEPS):
            for _ in range(num_prompts):
                self._add(length, 1)
            steps.append(self._timed(1, 1))
        return sorted(steps, key=lambda step: step.seconds)[(len(steps) - 1) // 2]

    def _decode(self, batch: int, context: int) -> Iterator[TimedStep]:
        context = min(context, self._engine.max_model_len - self._steps_to_start(batch, context) - _STEPS[1])
        if context >= 1:
            self._start(batch, context, _STEPS[1])
            yield self._timed(*_STEPS)
            self._engine.abandon()

    def _steps_to_start(self, batch: int, context: int) -> int:
        """In which so many prompts are computed, while the first of them decode already, and one more to be safe."""
        return -(-batch * context // max(1, _MOST_TOKENS - batch)) + 2

    def _start(self, batch: int, context: int, more_steps: int) -> None:
        """Runs so many sequences until each has its first token, and can decode for that many steps more."""
        stats, steps = self._engine.stats, self._steps_to_start(batch, context)
        for _ in range(batch):
            self._add(context, steps + more_steps + 1)
        for _ in range(steps):
            before = stats.sampled_tokens
            self._engine.step()
            if stats.sampled_tokens - before >= batch:
                break

    def _timed(self, fewest: int, most: int) -> TimedStep:
        """The median time of some steps, with what they did in the mean."""
        stats, seconds = self._engine.stats, list[float]()
        names = ("scheduled_tokens", "sampled_tokens", "context_tokens", "query_key_pairs")
        before = [getattr(stats, name) for name in names]
        while len(seconds) < fewest or (len(seconds) < most and sum(seconds) < _DECODE_SECONDS):
            start = time.perf_counter()
            self._engine.step()
            seconds.append(time.perf_counter() - start)
        done = [(getattr(stats, name) - old) / len(seconds) for name, old in zip(names, before, strict=True)]
        return TimedStep(done[0], done[1], done[2], done[3], median(seconds))

    def _add(self, prompt: int, outputs: int) -> None:
        tokens = self._rng.integers(0, self._engine.vocab_size, prompt, np.int32)
        params = SamplingParams(max_tokens=outputs, temperature=0.0, ignore_eos=True)
        self._engine.add(Request(RequestId(0, self._row), tokens, params, outputs, noise_key=0))
        self._row += 1


def _today() -> str:
    return datetime.date.today().isoformat()
