"""Asks for the memory of a CPU's KV cache while the weights are being loaded. Called by the pipeline."""

import sys
from functools import partial

from batchinfer.cache.host_pages import HostPages
from batchinfer.cache.spec import ELEMENT_BYTES, KVCacheSpec
from batchinfer.config import JobConfig
from batchinfer.data.fewest_tokens import fewest_tokens
from batchinfer.data.job_input import JobInput
from batchinfer.errors import BatchInferError, UsageError
from batchinfer.executors.cache_size import size_cache
from batchinfer.models.loader import load_scheme, load_spec, own_dtype
from batchinfer.models.resolve import ModelFiles
from batchinfer.models.spec import DecoderSpec
from batchinfer.request import SamplingParams


def early_pages(
    config: JobConfig,
    files: ModelFiles,
    job: JobInput,
    defaults: SamplingParams,
    num_left: int,
    device: str,
    free_bytes: int,
) -> HostPages | None:
    """Room for the job's cache, of which a thread asks for as much as its rows need at least.

    num_left: rows to be answered. device: "cpu" or "cuda". free_bytes: of its memory, before anything is loaded. None
    on a GPU, outside Linux, and where the model or the options are at fault, which loading says better.
    """
    if not sys.platform.startswith("linux") or device != "cpu":
        return None
    try:
        model = load_spec(files.path, config.model.allowed_config_fields)
        spec = _cache_spec(config, files, model)
        pages = HostPages(spec, size_cache(config, model, spec, 0, free_bytes, device).num_blocks)
        most_weights = 2 * sum(
            file.stat().st_size for file in files.path.glob("*.safetensors")
        )  # widened, at the worst
        surely_there = size_cache(config, model, spec, most_weights, free_bytes, device).num_blocks
    except (BatchInferError, UsageError, ValueError, OSError):
        return None
    at_once = min(num_left, config.scheduler.max_num_seqs)
    shares = config.cache.enable_prefix_caching and not config.scheduler.reserves
    longest = config.model.max_model_len or model.max_position_embeddings
    tokens = partial(fewest_tokens, job, defaults, longest, spec.block_size if shares else None)
    pages.ask_for(lambda: min(surely_there, int(at_once * tokens()) // spec.block_size))
    return pages


def _cache_spec(config: JobConfig, files: ModelFiles, model: DecoderSpec) -> KVCacheSpec:
    """The shape of the cache; the scales of an 8-bit one are no part of its pages."""
    is_quantised = load_scheme(files.path, config.model.quantization) is not None
    own = own_dtype(files.path, model, is_quantised) if config.model.dtype == "auto" else config.model.dtype
    dtype = own if config.cache.kv_cache_dtype == "auto" else config.cache.kv_cache_dtype
    return KVCacheSpec(
        model.num_layers,
        model.num_kv_heads,
        model.head_dim,
        config.cache.block_size,
        dtype,
        per_token_scales=ELEMENT_BYTES[dtype] == 1,
        wide_layers=config.cache.skip_layers,
        wide_dtype=own,
    )
