"""Self-attention of a decoder layer over the paged KV cache."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from batchinfer.cache.paged_kv import PagedKVCache
from batchinfer.kernels.kv_store import rotary_kv_store
from batchinfer.kernels.paged_attention import paged_attention
from batchinfer.kernels.rms_norm import rms_norm
from batchinfer.models.batch import Batch
from batchinfer.models.key_offsets import KnownKeys
from batchinfer.models.linear import Projection
from batchinfer.models.spec import DecoderSpec
from batchinfer.quantization.kv_scales import KVScales

# Gets a layer and its rotated queries, [num_tokens, num_q_heads, head_dim].
ObserveQueries = Callable[[int, Tensor], None]


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

    def __call__(
        self,
        hidden: Tensor,
        batch: Batch,
        rotation: StepRotation,
        cache: PagedKVCache,
        known: KnownKeys = (None, None),
        observe: ObserveQueries | None = None,
    ) -> Tensor:
        """[num_tokens, hidden_size] to the same. known: of the keys, where the cache makes use of it."""
        spec, layer = self._spec, self._layer
        heads = self._qkv(hidden).unflatten(-1, (-1, spec.head_dim))
        q, k, v = heads.split([spec.num_q_heads, spec.num_kv_heads, spec.num_kv_heads], dim=1)
        if self._q_norm is not None and self._k_norm is not None:
            q, k = rms_norm(q, self._q_norm, spec.rms_norm_eps), rms_norm(k, self._k_norm, spec.rms_norm_eps)
        stored = (cache.key(layer), cache.value(layer))
        scales: tuple[Tensor | None, Tensor | None] = (cache.key_scale(layer), cache.value_scale(layer))
        if self._kv_scales is not None and cache.spec.has_static_scales(layer):
            scales = (self._kv_scales.key, self._kv_scales.value)
        rotated = (q, k, v, rotation.rows, rotation.cos_sin)
        q = rotary_kv_store(*rotated, *stored, batch.slot_mapping, *scales, *known, batch.positions)
        if observe is not None:
            observe(layer, q)
        attended = paged_attention(
            q,
            *stored,
            batch.block_table,
            batch.cu_seqlens_q,
            batch.seq_lens,
            spec.head_dim**-0.5,
            *scales,
            sliding_window=spec.sliding_windows[layer],
            k_offset=known[0],
            stacks=batch.stacks,
        )
        return self._output(attended.flatten(1))
