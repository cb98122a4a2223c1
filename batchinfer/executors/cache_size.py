"""How large the KV cache becomes and how long sequences may be: pure arithmetic over sizes, and the lines that tell the
user. Called by local.py."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from batchinfer.cache.spec import KVCacheSpec
from batchinfer.config import JobConfig
from batchinfer.errors import UsageError
from batchinfer.executors.step_memory import attention_bytes, graph_bytes
from batchinfer.models.spec import DecoderSpec
from batchinfer.units import format_bytes

DEFAULT_SHARE = {"cpu": 0.5, "cuda": 0.9}
LOGITS_BYTES = 192 << 20  # what model runner, sampler and the decoder's head bound their logits to, together


@dataclass(frozen=True, slots=True)
class CacheSize:
    """What was decided. model_len_reason: why max_model_len is what it is, in words."""

    num_blocks: int
    max_model_len: int
    model_len_reason: str


def memory_budget(
    config: JobConfig,
    model: DecoderSpec,
    weight_bytes: int,
    free_bytes: int | None,
    device: str,
    cache: KVCacheSpec,
    num_blocks: int,
    scratch_bytes: int = 0,
) -> dict[str, Any]:
    """What a run takes of its device with a cache of that many blocks; arguments as of size_cache.

    `weights_bytes`, `cache_bytes`; `activations_bytes` and `logits_bytes`, which are allowances; `attention_bytes` and
    `graphs_bytes`, which a GPU's steps hold beside them, 0 on a CPU; `total_bytes` of them;
    `limit_bytes`: what they may take, None where --kv-cache-memory says what the cache takes; `free_bytes`: before
    anything was loaded, None where it is not known; `blocks`, `block_size`, `step_tokens` and `device`.
    """
    step_tokens = config.scheduler.max_num_batched_tokens
    is_limited = config.cache.kv_cache_memory is None and free_bytes is not None
    model_len = min(config.model.max_model_len or model.max_position_embeddings, num_blocks * cache.block_size)
    attention, graphs = _held_by_steps(config, model, cache, model_len, device, scratch_bytes)
    parts = {
        "weights_bytes": weight_bytes,
        "activations_bytes": activation_bytes(model, step_tokens) - LOGITS_BYTES + scratch_bytes,
        "logits_bytes": LOGITS_BYTES,
        "attention_bytes": attention,
        "graphs_bytes": graphs,
        "cache_bytes": num_blocks * cache.bytes_per_block(),
    }
    return {
        "device": device,
        **parts,
        "total_bytes": sum(parts.values()),
        "limit_bytes": int(_share(config, device) * (free_bytes or 0)) if is_limited else None,
        "free_bytes": free_bytes,
        "blocks": num_blocks,
        "block_size": cache.block_size,
        "step_tokens": step_tokens,
    }


def memory_table(budget: Mapping[str, Any]) -> list[str]:
    """memory_budget's figures for people."""
    notes = {
        "weights": "",
        "activations": f"allowed for a step of {budget['step_tokens']:,} tokens",
        "logits": "allowed for the rows of a step that sample",
        "attention": "its sums before they are joined, and what the cache leaves out of the keys",
        "graphs": "captured decode steps",
        "cache": f"{budget['blocks']:,} blocks of {budget['block_size']} tokens",
        "total": _limits(budget),
    }
    names = {"cache": "KV cache", "total": "in all"}
    return [
        f"{names.get(part, part):<12}{format_bytes(budget[f'{part}_bytes']):>10}  {note}".rstrip()
        for part, note in notes.items()
        if budget[f"{part}_bytes"] or part not in ("attention", "graphs")
    ]


def _limits(budget: Mapping[str, Any]) -> str:
    if budget["free_bytes"] is None:
        return "the memory of the device is not known here"
    free = f"{format_bytes(budget['free_bytes'])} were free on the {'CPU' if budget['device'] == 'cpu' else 'GPU'}"
    limit = budget["limit_bytes"]
    if budget["total_bytes"] > budget["free_bytes"]:
        return f"more than there is: {free}"
    return free if limit is None else f"of {format_bytes(limit)} allowed; {free}"


def size_cache(
    config: JobConfig,
    model: DecoderSpec,
    cache: KVCacheSpec,
    weight_bytes: int,
    free_bytes: int,
    device: str,
    scratch_bytes: int = 0,
) -> CacheSize:
    """As many blocks as --kv-cache-memory or the share of `free_bytes` (before the weights were loaded) allows, but no
    more than max_num_seqs sequences of max_model_len fill. device: "cpu" or "cuda". scratch_bytes: most that a product
    takes beside operands and results, which counts as activations: a GPU writes a quantised weight out for many rows.

    Raises UsageError, with the numbers, where an explicit max_model_len fits neither model nor cache, and where the
    memory holds no cache at all.
    """
    wanted_len = config.model.max_model_len
    if wanted_len is not None and wanted_len > model.max_position_embeddings:
        raise UsageError(
            f"--max-model-len {wanted_len}: the model has positions for {model.max_position_embeddings} tokens"
        )
    longest = wanted_len or model.max_position_embeddings
    most_blocks = config.scheduler.max_num_seqs * -(-longest // cache.block_size)
    memory = _cache_bytes(config, model, weight_bytes + scratch_bytes, free_bytes, device)
    if config.cache.kv_cache_memory is None:  # sequences are no longer than the cache would be without what they take
        model_len = max(1, min(longest, cache.num_blocks(memory) * cache.block_size))
        memory -= sum(_held_by_steps(config, model, cache, model_len, device, scratch_bytes))
    num_blocks = min(cache.num_blocks(memory), most_blocks)
    capacity = num_blocks * cache.block_size
    if capacity < 2:
        raise UsageError(
            f"the KV cache may take {format_bytes(max(memory, 0))}, but a block of {cache.block_size} tokens takes "
            f"{format_bytes(cache.bytes_per_block())}: give more with --kv-cache-memory"
        )
    if wanted_len is not None and wanted_len > capacity:
        needed = -(-wanted_len // cache.block_size) * cache.bytes_per_block()
        raise UsageError(
            f"--max-model-len {wanted_len} does not fit the KV cache: {format_bytes(memory)} hold {capacity} tokens; "
            f"give --kv-cache-memory {-(-needed // 2**20)}MiB or more, or a lower --max-model-len"
        )
    return CacheSize(num_blocks, min(longest, capacity), _reason(wanted_len, longest, capacity))


def _reason(wanted_len: int | None, longest: int, capacity: int) -> str:
    if wanted_len is not None:
        return "fixed beforehand"
    return "the model's" if longest <= capacity else f"what the KV cache holds; the model's is {longest:,}"


def _cache_bytes(config: JobConfig, model: DecoderSpec, weight_bytes: int, free_bytes: int, device: str) -> int:
    if config.cache.kv_cache_memory is not None:
        return config.cache.kv_cache_memory
    return (
        int(_share(config, device) * free_bytes)
        - weight_bytes
        - activation_bytes(model, config.scheduler.max_num_batched_tokens)
    )


def _held_by_steps(
    config: JobConfig, model: DecoderSpec, cache: KVCacheSpec, model_len: int, device: str, scratch_bytes: int
) -> tuple[int, int]:
    """Bytes of attention and of captured steps; sequences have up to model_len tokens."""
    if device == "cpu":
        return 0, 0
    row_bytes = activation_bytes(model, 1) - LOGITS_BYTES
    graphs = graph_bytes(config, model, cache, model_len, row_bytes, scratch_bytes)
    return attention_bytes(config, model, cache, model_len), graphs


def _share(config: JobConfig, device: str) -> float:
    return config.cache.gpu_memory_utilization or DEFAULT_SHARE[device]


def activation_bytes(model: DecoderSpec, num_tokens: int) -> int:
    """An allowance for what a step of that many tokens holds beside weights and cache: float32 copies of a layer's
    widest tensors and the logits."""
    heads = (model.num_q_heads + 2 * model.num_kv_heads) * model.head_dim
    widths = 4 * model.hidden_size + 3 * model.intermediate_size + 2 * heads
    return 4 * widths * num_tokens + LOGITS_BYTES


def describe(size: CacheSize, cache: KVCacheSpec, max_num_seqs: int) -> list[str]:
    """Lines for the log."""
    tokens = size.num_blocks * cache.block_size
    most_seqs = min(max_num_seqs, size.num_blocks)
    if cache.element_bytes == 1:
        gain = f"{cache.dtype} holds {cache.gain_over_16_bits():.2f} times as many tokens as 16 bits"
    else:
        fp8 = replace(cache, dtype="fp8", per_token_scales=True)
        gain = f"--kv-cache-dtype fp8 would hold {fp8.gain_over_16_bits():.2f} times as many tokens as 16 bits"
    return [
        f"max_model_len: {size.max_model_len:,} ({size.model_len_reason})",
        f"KV cache: {format_bytes(size.num_blocks * cache.bytes_per_block())} of {_precision(cache)} holds {tokens:,} "
        f"tokens in {size.num_blocks:,} blocks of {cache.block_size}; {gain}",
        f"sequences at once: {min(max_num_seqs, tokens // size.max_model_len):,} of max_model_len, "
        f"{most_seqs:,} of up to {tokens // most_seqs:,} tokens",
    ]


def _precision(cache: KVCacheSpec) -> str:
    """ "fp8", or "fp8 by the checkpoint's scales (2 of 30 layers bf16)"."""
    wide = len(cache.wide_layers)
    layers = f" ({wide} of {cache.num_layers} layers {cache.wide_dtype})" if wide else ""
    return cache.dtype + (" by the checkpoint's scales" if cache.static_scales else "") + layers
