"""Self-attention of a decoder layer over the paged KV cache."""

from dataclasses import dataclass

from torch import Tensor

from batchinfer.cache.paged_kv import PagedKVCache
from batchinfer.kernels.kv_store import rotary_kv_store
from batchinfer.kernels.paged_attention import paged_attention
from batchinfer.kernels.rms_norm import rms_norm
from batchinfer.models.batch import Batch, Contexts
from batchinfer.models.key_offsets import KnownKeys
from batchinfer.models.linear import Projection
from batchinfer.models.spec import DecoderSpec
from batchinfer.quantization.kv_scales import KVScales


@dataclass(frozen=True, slots=True)
class StepRotation:
    """Cosines and sines of a step's tokens, the same for all layers."""

    cos_sin: Tensor  # float32 [num_tokens, rotary_dim]
    rows: Tensor  # int64 [num_tokens], row of each token in cos_sin


class Attention:
    """Projects, rotates, stores the new keys and values in the cache and attends to what the cache then holds.

    qkv stacks the rows of the query, key and value projections. q_norm, k_norm: [head_dim], where the spec has them.
    kv_scales: the checkpoint's own, which a cache without scales a token takes.
    """

    def __init__(
        self,
        spec: DecoderSpec,
        layer: int,
        qkv: Projection,
        output: Projection,
        q_norm: Tensor | None = None,
        k_norm: Tensor | None = None,
        *,
        kv_scales: KVScales | None = None,
    ) -> None:
        self._spec = spec
        self._layer = layer
        self._qkv = qkv
        self._output = output
        self._q_norm = q_norm
        self._k_norm = k_norm
        self._kv_scales = kv_scales

    def project(self, hidden: Tensor) -> Tensor:
        """Queries, keys and values side by side, [num_tokens, num_q_heads + 2 * num_kv_heads, head_dim]; hidden:
        [num_tokens, hidden_size]."""
        spec = self._spec
        return self._qkv(hidden).view(-1, spec.num_q_heads + 2 * spec.num_kv_heads, spec.head_dim)

    def store(
        self, heads: Tensor, batch: Batch, rotation: StepRotation, cache: PagedKVCache, known: KnownKeys = (None, None)
    ) -> Tensor:
        """Puts keys and values into the cache; returns the rotated queries, [num_tokens, num_q_heads, head_dim].

        heads: what `project` returned. known: of the keys, where the cache makes use of it.
        """
        spec = self._spec
        q, k, v = heads.split_with_sizes([spec.num_q_heads, spec.num_kv_heads, spec.num_kv_heads], 1)
        if self._q_norm is not None and self._k_norm is not None:
            q, k = rms_norm(q, self._q_norm, spec.rms_norm_eps), rms_norm(k, self._k_norm, spec.rms_norm_eps)
        rotated = (q, k, v, rotation.rows, rotation.cos_sin)
        stored = self._stored(cache)
        return rotary_kv_store(*rotated, *stored[:2], batch.slot_mapping, *stored[2:], *known, batch.positions)

    def attend(self, q: Tensor, contexts: Contexts, cache: PagedKVCache, known: KnownKeys = (None, None)) -> Tensor:
        """[num_queries, hidden_size] of queries that `store` returned, all of a batch's or those it wants. known: as
        there."""
        spec, (keys, values, *scales) = self._spec, self._stored(cache)
        attended = paged_attention(
            q,
            keys,
            values,
            contexts.block_table,
            contexts.cu_seqlens_q,
            contexts.seq_lens,
            spec.head_dim**-0.5,
            *scales,
            sliding_window=spec.sliding_windows[self._layer],
            k_offset=known[0],
            stacks=contexts.stacks,
        )
        return self._output(attended.flatten(1))

    def _stored(self, cache: PagedKVCache) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        """Keys, values and their scales."""
        layer = self._layer
        scales: tuple[Tensor | None, Tensor | None] = (cache.key_scale(layer), cache.value_scale(layer))
        if self._kv_scales is not None and cache.spec.has_static_scales(layer):
            scales = (self._kv_scales.key, self._kv_scales.value)
        return cache.key(layer), cache.value(layer), *scales
