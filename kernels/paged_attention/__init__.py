"""Causal attention of new tokens over the paged KV cache. Called by each attention layer after kv_store."""

from types import ModuleType

import torch
from batchinfer.kernels.common.cache_form import check_cache
from batchinfer.kernels.common.fp8 import check_scales
from batchinfer.kernels.common.key_offset import check_key_offset
from batchinfer.kernels.paged_attention import cpu, reference
from batchinfer.kernels.paged_attention.segments import stack_size
from batchinfer.kernels.paged_attention.variant import Variant


def paged_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    sinks: torch.Tensor | None = None,
    k_offset: torch.Tensor | None = None,
    stacks: torch.Tensor | None = None,
) -> torch.Tensor:
    """softmax(scale * q k^T) v, where query j of a sequence stands at position seq_len - q_len + j and sees the keys
    at positions up to its own (the last `sliding_window` of them, its own included, where that is given).

    q: [num_tokens, num_q_heads, head_dim], bf16, fp16 or fp32, any strides; num_q_heads a multiple of num_kv_heads.
    k_cache, v_cache: [num_blocks, num_kv_heads, block_size, head_dim], contiguous, or on a CPU in contiguous blocks;
        the new tokens' keys and values are in them already.
    block_table: int32 [num_seqs, max_blocks]; entries beyond a sequence's length are not read.
    cu_seqlens_q: int32 [num_seqs + 1], first token of each sequence in q, then num_tokens.
    seq_lens: int32 [num_seqs], length of each context, new tokens included.
    k_scale, v_scale: factors of the stored vectors of an 8-bit cache, float32: [num_blocks, num_kv_heads, block_size],
        or static ones, [num_kv_heads] or [1].
    soft_cap: scores s become soft_cap * tanh(s / soft_cap) before the softmax (Gemma 2, arXiv 2408.00118).
    sinks: float32 [num_q_heads], a score of each head that joins the softmax's sum and carries no value (gpt-oss).
    k_offset: float32 [num_segments, num_kv_heads, head_dim], contiguous, what rotary_kv_store took off the keys: of a
        key at position p it is row p // SEGMENT, and the whole key is the stored one and this. It covers all positions
        of the block table, and goes with neither soft_cap nor sinks. A GPU takes 4 bytes a token, head and segment for
        its products with the queries.
    stacks: int32 [num_seqs, 1 + segments.stack_size(heads of a KV head)], contiguous, for a GPU and without a sliding
        window: which sequences with one new token attend to their first keys together. Of each sequence: how many of
        its first segments (segments.segment_keys) it shares with its stack, which all have in common, block for block,
        and of which its last token is in none; then the sequences of the stack, the same for all of them, filled up
        with -1. 0 and the sequence itself where it shares none. The result does not depend on it, and other devices,
        which find what is shared by themselves or do without, make no use of it.
    Returns [num_tokens, num_q_heads, head_dim] in q's dtype.

    A token's result depends on its own sequence alone, and neither on the block size nor on how the sequence was cut
    into chunks. Raises ValueError on shapes that do not fit.
    """
    _check(q, k_cache, v_cache, block_table, cu_seqlens_q, seq_lens)
    check_scales(k_cache, k_scale, v_scale)
    check_key_offset(k_offset, k_cache, k_scale, block_table.shape[1] * k_cache.shape[2])
    variant = Variant(scale, sliding_window, soft_cap, sinks, k_offset)
    variant.validate(q.shape[1])
    arguments = (q, k_cache, v_cache, block_table, cu_seqlens_q, seq_lens, k_scale, v_scale, variant)
    if q.is_cuda:
        from batchinfer.kernels.paged_attention import gpu  # here, as it brings Triton

        _check_stacks(stacks, len(seq_lens), q.shape[1] // k_cache.shape[1])
        return gpu.paged_attention(*arguments, stacks)
    backend: ModuleType = cpu if cpu.can_run(q, k_cache) else reference
    return backend.paged_attention(*arguments)


def _check_stacks(stacks: torch.Tensor | None, num_seqs: int, group: int) -> None:
    wanted = (num_seqs, 1 + stack_size(group))
    if stacks is not None and (stacks.shape != wanted or stacks.dtype != torch.int32 or not stacks.is_contiguous()):
        raise ValueError(f"stacks {stacks.dtype} {tuple(stacks.shape)}: must be int32 {wanted} and contiguous")


def _check(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    seq_lens: torch.Tensor,
) -> None:
    _, num_kv_heads, _, head_dim = k_cache.shape
    check_cache(k_cache, v_cache)
    if q.shape[-1] != head_dim or q.shape[1] % num_kv_heads:
        raise ValueError(f"queries {tuple(q.shape)} do not fit the cache {tuple(k_cache.shape)}")
    num_seqs = seq_lens.shape[0]
    if cu_seqlens_q.shape[0] != num_seqs + 1 or block_table.shape[0] != num_seqs:
        raise ValueError(f"{num_seqs} lengths, {cu_seqlens_q.shape[0]} offsets, {block_table.shape[0]} block tables")
