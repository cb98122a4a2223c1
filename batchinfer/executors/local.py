"""One engine in this process: device, threads, weights, and a cache that fits the memory. Called by the pipeline,
the LLM class and evaluation/."""

import os
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from batchinfer.cache.spec import KVCacheSpec
from batchinfer.cache_config import CacheConfig
from batchinfer.config import JobConfig
from batchinfer.data.built_in_text import built_in_text
from batchinfer.data.byte_tokenizer import ByteTokenizer
from batchinfer.data.tokenizer import Tokenizer
from batchinfer.errors import BatchInferError, UsageError
from batchinfer.executors.host_memory import keep_freed_memory
from batchinfer.models.resolve import ModelFiles, has_tokenizer
from batchinfer.models.step_work import StepWork, step_work
from batchinfer.roofline import machine_name

if TYPE_CHECKING:
    from batchinfer.cache.host_pages import HostPages
    from batchinfer.cache.paged_kv import PagedKVCache
    from batchinfer.engine.engine import Engine
    from batchinfer.models.decoder import Decoder

_LEAST_CAPABILITY = (8, 0)
_CGROUP = Path("/sys/fs/cgroup")


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """Weights and tokenizer, before anything is known of the cache."""

    decoder: "Decoder"
    tokenizer: Tokenizer
    device: str  # "cpu" or "cuda"
    free_bytes: int  # of the device, before the weights were loaded
    eos_token_ids: frozenset[int]
    pages: "HostPages | None" = None  # for the cache


@dataclass(frozen=True, slots=True)
class LocalEngine:
    """A loaded engine and what its caller needs beside it."""

    engine: "Engine"
    tokenizer: Tokenizer
    device: str  # "cpu" or "cuda"
    kv_cache_bytes: int
    work: StepWork

    def figures(self) -> dict[str, Any]:
        """EngineStats.to_dict() with what its counts stand for, and on which machine, with how many threads of a CPU (0
        on a GPU) and until when it ran."""
        import torch

        place = {
            "machine": machine_name(self.device),
            "threads": torch.get_num_threads() if self.device == "cpu" else 0,
            "ended_at": datetime.now(UTC).isoformat(timespec="seconds"),
        }
        return {**self.engine.stats.to_dict(), **place, "step_work": self.work.to_json()}


def load_engine(config: JobConfig, files: ModelFiles, report: Callable[[str], None]) -> LocalEngine:
    """Loads weights and tokenizer and allocates the cache. `report` gets the lines that say what was decided.

    Raises UsageError for a device that is not there or sizes that do not fit, BatchInferError for a faulty model.
    """
    return build_engine(config, load_model(config, files, report), report)


def load_model(
    config: JobConfig,
    files: ModelFiles,
    report: Callable[[str], None],
    early_pages: "Callable[[str, int], HostPages | None]" = lambda device, free_bytes: None,
) -> LoadedModel:
    """early_pages: memory for the cache that is asked for meanwhile; it gets the device and its free bytes. Raises
    UsageError for a device that is not there, BatchInferError for a faulty model."""
    import torch

    from batchinfer.models.loader import eos_token_ids, load_decoder

    device = choose_device(config.model.device, torch.cuda.is_available())
    if device == "cuda" and torch.version.hip is None:
        check_capability(torch.cuda.get_device_name(), torch.cuda.get_device_capability())
    elif device == "cuda":
        check_amd(torch.cuda.get_device_name())
    torch.set_num_threads(config.model.threads or usable_processors())
    free_bytes = torch.cuda.mem_get_info()[0] if device == "cuda" else available_memory()
    pages = early_pages(device, free_bytes)
    allowed, options = config.model.allowed_config_fields, config.model
    decoder = load_decoder(
        *(files.path, options.dtype, device, allowed, options.activation_dtype, options.quantization, report),
        options.load_format,
    )
    tokenizer = load_tokenizer(config, files.path, decoder.vocab_size)
    if device == "cpu":
        keep_freed_memory()
    ends = eos_token_ids(files.path)
    if tokenizer.eos_token_id is not None:
        ends |= {tokenizer.eos_token_id}
    return LoadedModel(decoder, tokenizer, device, free_bytes, ends, pages)


def load_tokenizer(config: JobConfig, path: Path, vocab_size: int) -> Tokenizer:
    """The model's; for weights drawn at random it may have none, and bytes serve."""
    if config.model.load_format == "dummy" and not has_tokenizer(path):
        return ByteTokenizer(vocab_size)
    return Tokenizer.load(path, config.input.chat_template)


def cache_spec(config: CacheConfig, model: LoadedModel, wide_layers: Collection[int] = ()) -> KVCacheSpec:
    """The cache that the options ask for; what it will not hold of the keys is measured, once a model. wide_layers:
    kept in the model's precision beside those that the options name. Raises UsageError where they name a layer that
    the model does not have."""
    from batchinfer.engine.key_statistics import measure_keys

    skipped, num_layers = config.skip_layers, model.decoder.spec.num_layers
    if skipped and skipped[-1] >= num_layers:
        raise UsageError(f"--kv-cache-dtype-skip-layers {skipped[-1]}: the model has layers 0 to {num_layers - 1}")
    wide = sorted({*skipped, *wide_layers})
    spec = model.decoder.kv_cache_spec(config.block_size, config.kv_cache_dtype, wide)
    if spec.per_token_scales and not model.decoder.has_key_offsets:
        (token_ids,) = model.tokenizer.encode_batch([built_in_text()])
        model.decoder.take_off_keys(measure_keys(model.decoder, token_ids, config.block_size))
    return spec


def build_engine(
    config: JobConfig,
    model: LoadedModel,
    report: Callable[[str], None],
    wide_layers: Collection[int] = (),
    overlaps: bool = True,
) -> LocalEngine:
    """Allocates the cache, of which wide_layers are kept in the model's precision, and makes a GPU ready for the first
    step. `report` gets the lines that say what was decided. overlaps: a GPU's steps may be submitted before the last
    one has ended, so that a call of Engine.step does not stand for one. Raises UsageError for sizes that do not fit."""
    from batchinfer.cache.paged_kv import PagedKVCache
    from batchinfer.executors.cache_size import describe, memory_budget, memory_table, size_cache

    decoder, spec = model.decoder, cache_spec(config.cache, model, wide_layers)
    scratch = decoder.scratch_bytes
    size = size_cache(config, decoder.spec, spec, decoder.weight_bytes, model.free_bytes, model.device, scratch)
    for line in describe(size, spec, config.scheduler.max_num_seqs):
        report(line)
    if config.scheduler.reserves and config.cache.enable_prefix_caching:
        report("--kv-allocation contiguous: nothing of the cache can be shared, so prefix caching is off")
    cache = PagedKVCache(spec, size.num_blocks, model.device, model.pages)
    if model.pages is not None:
        model.pages.wait() if model.pages.memory(spec, size.num_blocks) else model.pages.stop()
    if config.cache.explain_memory:
        sizes = (decoder.weight_bytes, model.free_bytes, model.device, spec, size.num_blocks, scratch)
        for line in memory_table(memory_budget(config, decoder.spec, *sizes) | {"cache_bytes": cache.nbytes}):
            report(line)
    engine = _engine(config, model, cache, size.max_model_len, overlaps, report)
    return LocalEngine(engine, model.tokenizer, model.device, cache.nbytes, step_work(decoder, spec))


def _engine(
    config: JobConfig,
    model: LoadedModel,
    cache: "PagedKVCache",
    max_model_len: int,
    overlaps: bool,
    report: Callable[[str], None],
) -> "Engine":
    """On a GPU with its kernels compiled and its graphs captured."""
    from batchinfer.cache.block_pool import BlockPool
    from batchinfer.engine.engine import Engine

    decoder, spec, scheduler = model.decoder, cache.spec, config.scheduler
    arguments: dict[str, Any] = {
        "rope_length_threshold": decoder.spec.rope.length_threshold,
        "sliding_windows": decoder.spec.sliding_windows,
    }
    pool = BlockPool(cache.num_blocks, spec.block_size, config.cache.enable_prefix_caching)
    common = (decoder, cache, pool, model.tokenizer, scheduler, model.eos_token_ids, max_model_len)
    if model.device == "cpu":
        return Engine(*common, **arguments)
    from batchinfer.executors.gpu_steps import STEPS_IN_FLIGHT, gpu_steps

    start = time.perf_counter()
    steps = gpu_steps(decoder, spec, scheduler.max_num_seqs, max_model_len, config.model.enforce_eager)
    in_flight = STEPS_IN_FLIGHT if overlaps else 1
    engine = Engine(
        *common, in_flight, **arguments, queue=steps.queue, graphs=steps.graphs, key_stacks=steps.key_stacks
    )
    engine.warm_up()
    graphs = f", {steps.graphs.count} graphs of decode steps captured" if steps.graphs else ""
    report(f"GPU made ready in {time.perf_counter() - start:.1f} s: kernels compiled{graphs}")
    return engine


def prepare_kernels(config: JobConfig, report: Callable[[str], None]) -> None:
    """Compiles the native kernels of a CPU, where no earlier process did."""
    import torch

    from batchinfer.kernels.common import native

    if choose_device(config.model.device, torch.cuda.is_available()) == "cpu":
        native.prepare(report)


def build_kernels(report: Callable[[str], None], output: Path | None = None) -> Path:
    """Compiles what is missing of the native kernels: for this machine, or into `output` for other machines of its
    architecture. Returns their directory. Raises BatchInferError."""
    from batchinfer.kernels.common import native

    try:
        return native.build(report) if output is None else native.build_ahead(report, output)
    except native.NativeBuildError as error:
        raise BatchInferError(str(error)) from error


def choose_device(wanted: str, has_cuda: bool) -> str:
    """wanted: one of config.DEVICES. Raises UsageError where it asks for a GPU that torch does not see."""
    if wanted == "cuda" and not has_cuda:
        raise UsageError("--device cuda: torch sees no CUDA device; use --device cpu, or check the driver")
    return ("cuda" if has_cuda else "cpu") if wanted == "auto" else wanted


def check_capability(name: str, capability: tuple[int, int]) -> None:
    """capability: CUDA's of the GPU called `name`. Raises UsageError where it is too old for the kernels."""
    if capability < _LEAST_CAPABILITY:
        found, least = (".".join(map(str, version)) for version in (capability, _LEAST_CAPABILITY))
        raise UsageError(
            f"--device cuda: the {name} has compute capability {found}, the kernels need {least} or newer; "
            "use --device cpu"
        )


def check_amd(name: str) -> None:
    """Raises UsageError where the active device, AMD's GPU called `name`, is none that the kernels know."""
    from batchinfer.kernels.common import triton_targets  # here, as it brings Triton

    try:
        triton_targets.current()
    except RuntimeError as error:
        raise UsageError(f"--device cuda: the {name} is a {error}; use --device cpu") from error


def usable_processors() -> int:
    """Processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def available_memory(cgroup: Path = _CGROUP) -> int:
    """Bytes that this process can still take: of the machine, and under its container's limit where it has one."""
    import psutil

    available = int(psutil.virtual_memory().available)
    try:
        limit, used = ((cgroup / name).read_text().strip() for name in ("memory.max", "memory.current"))
    except OSError:
        return available
    return available if limit == "max" else min(available, max(0, int(limit) - int(used)))
