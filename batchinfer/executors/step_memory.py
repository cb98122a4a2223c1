"""What steps hold of a GPU's memory beside weights, cache, activations and logits, in closed form. Called by
cache_size.py for a run and for a plan, which needs no torch for anything else."""

from batchinfer.cache.spec import ELEMENT_BYTES, KVCacheSpec
from batchinfer.config import JobConfig
from batchinfer.models.spec import DecoderSpec


def attention_bytes(config: JobConfig, model: DecoderSpec, cache: KVCacheSpec, model_len: int) -> int:
    """Of a step launched kernel by kernel: segments of decode attention before they are joined, and the products of all
    queries with the key offsets; and the tables of these in all layers. model_len: the longest sequence."""
    from batchinfer.kernels.paged_attention.segments import bias_bytes, part_bytes  # here, as they bring torch

    scheduler, has_offsets = config.scheduler, _has_offsets(model, cache)
    size = part_bytes(scheduler.max_num_seqs, model.num_q_heads, model.head_dim, model_len)
    if has_offsets:
        size += bias_bytes(scheduler.max_num_batched_tokens, model.num_q_heads, model_len)
        size += _table_bytes(model, model_len)
    return size


def graph_bytes(
    config: JobConfig,
    model: DecoderSpec,
    cache: KVCacheSpec,
    model_len: int,
    row_bytes: int,
    scratch_bytes: int,
) -> int:
    """Of the memory that captured decode steps have to themselves: once what the largest works in, as they never run
    side by side, and what each returns. row_bytes: of activations, for each row. scratch_bytes: as of size_cache."""
    if config.model.enforce_eager:
        return 0
    from batchinfer.engine.cuda_graphs import graph_sizes, graph_widths  # here, as they bring torch
    from batchinfer.kernels.paged_attention.segments import bias_bytes, part_bytes

    rows = config.scheduler.max_num_seqs
    work = rows * row_bytes + scratch_bytes + part_bytes(rows, model.num_q_heads, model.head_dim, model_len)
    work += bias_bytes(rows, model.num_q_heads, model_len) if _has_offsets(model, cache) else 0
    widths = graph_widths(-(-model_len // cache.block_size), cache.block_size, cache.per_token_scales)
    returned = sum(graph_sizes(rows)) * model.hidden_size * ELEMENT_BYTES[cache.wide_dtype]
    return work + len(widths) * returned


def written_out_bytes(model: DecoderSpec, dtype: str) -> int:
    """The scratch_bytes of size_cache where a GPU writes quantised weights out in `dtype`: the largest of a layer's
    projections, of which those with the same input are one."""
    gate_up = 2 * model.intermediate_size * model.hidden_size
    qkv = (model.num_q_heads + 2 * model.num_kv_heads) * model.head_dim * model.hidden_size
    return ELEMENT_BYTES[dtype] * max(gate_up, qkv)


def _has_offsets(model: DecoderSpec, cache: KVCacheSpec) -> bool:
    """As engine/key_statistics.py: not where frequencies depend on the length."""
    return cache.per_token_scales and model.rope.length_threshold is None


def _table_bytes(model: DecoderSpec, model_len: int) -> int:
    """Of a layer's two tables, in float32, in all layers."""
    from batchinfer.kernels.common.key_offset import SEGMENT  # here, as it brings torch

    return 2 * 4 * model.num_layers * -(-model_len // SEGMENT) * model.num_kv_heads * model.head_dim
