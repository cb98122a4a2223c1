"""The one decoder that runs all families, driven by a DecoderSpec. Built by loader, called by the engine's model
runner."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from batchinfer.cache.paged_kv import TORCH_DTYPES, PagedKVCache
from batchinfer.cache.spec import ELEMENT_BYTES, KVCacheSpec
from batchinfer.kernels.rms_norm import add_rms_norm, rms_norm
from batchinfer.models.attention import Attention, StepRotation
from batchinfer.models.batch import Batch, Contexts
from batchinfer.models.key_offsets import KeyOffsets, KeyStatistics, KnownKeys
from batchinfer.models.linear import Linear, Lookup, Projection
from batchinfer.models.mlp import GatedMLP
from batchinfer.models.rope import RotaryEmbedding
from batchinfer.models.spec import DecoderSpec

# Gets a layer and its rotated queries, [num_tokens, num_q_heads, head_dim].
ObserveQueries = Callable[[int, Tensor], None]


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """Norms and the two blocks between them. The norms' weights: [hidden_size]."""

    input_norm: Tensor
    attention: Attention
    post_attention_norm: Tensor
    mlp: GatedMLP


class Decoder:
    """Weights and forward pass. It holds no state of any sequence: the batch and the cache are arguments.

    embedding: of vocab_size rows of hidden_size; the lm_head itself where the spec ties them and its form allows it.
    """

    def __init__(
        self,
        spec: DecoderSpec,
        embedding: Lookup,
        layers: Sequence[DecoderLayer],
        final_norm: Tensor,
        lm_head: Projection,
        num_parameters: int,
        weight_bytes: int,
        static_kv_dtypes: Collection[str] = (),
        scratch_bytes: int = 0,
    ) -> None:
        """static_kv_dtypes: dtypes of a cache that the attention layers have the checkpoint's own scales for.
        scratch_bytes: most that a product takes beside its operands and results."""
        self.spec = spec
        self.device = final_norm.device
        self.dtype = final_norm.dtype
        self.num_parameters = num_parameters  # tied ones counted once
        self.weight_bytes = weight_bytes
        self.scratch_bytes = scratch_bytes
        self._static_kv_dtypes = frozenset(static_kv_dtypes)
        self._embedding = embedding
        self._layers = layers
        self._final_norm = final_norm
        self._lm_head = lm_head
        self.rope = RotaryEmbedding(spec.rope, self.device)
        self._key_offsets: KeyOffsets | None = None

    @property
    def vocab_size(self) -> int:
        return self.spec.vocab_size

    @property
    def step_weight_bytes(self) -> int:
        """Of the weights that every step reads: all but the embedding, where it is not the head."""
        return self.weight_bytes - (0 if self._lm_head is self._embedding else self._embedding.nbytes)

    def kv_cache_spec(self, block_size: int, kv_dtype: str = "auto", wide_layers: Sequence[int] = ()) -> KVCacheSpec:
        """The cache that this model needs. kv_dtype: one of config.KV_CACHE_DTYPES; auto is the model's dtype, and the
        8-bit ones carry a scale a token and head, unless the checkpoint brings scales that fit. wide_layers: layers,
        rising, kept in the model's dtype."""
        own_dtype = next(name for name, dtype in TORCH_DTYPES.items() if dtype == self.dtype)
        if kv_dtype == "auto":
            kv_dtype = own_dtype
        return KVCacheSpec(
            num_layers=self.spec.num_layers,
            num_kv_heads=self.spec.num_kv_heads,
            head_dim=self.spec.head_dim,
            block_size=block_size,
            dtype=kv_dtype,
            per_token_scales=ELEMENT_BYTES[kv_dtype] == 1 and kv_dtype not in self._static_kv_dtypes,
            static_scales=kv_dtype in self._static_kv_dtypes,
            wide_layers=tuple(wide_layers),
            wide_dtype=own_dtype,
        )

    @property
    def has_key_offsets(self) -> bool:
        return self._key_offsets is not None

    def take_off_keys(self, statistics: Sequence[KeyStatistics | None]) -> None:
        """From now on a cache with a scale a token does not hold what the keys have in common, and attention puts it
        back. statistics: of each layer, or None. A cache that is in use already would be read wrongly."""
        self._key_offsets = KeyOffsets(self.rope, statistics)

    @torch.inference_mode()
    def forward(
        self,
        batch: Batch,
        cache: PagedKVCache,
        prompt_lens: Tensor | None = None,
        observe: ObserveQueries | None = None,
    ) -> Tensor:
        """Hidden states after the final norm, [num_tokens, hidden_size], and the batch's keys and values in the cache.

        Of tokens that the batch does not want, nothing in the last layer is needed but keys and values. Nothing else is
        computed of them there, and their rows only tell whether all numbers are finite that the token left in the
        cache, where others may read them.

        prompt_lens: int32 [num_seqs]; matters only to rotary embeddings with a `length_threshold` and to sequences
        above it. As in transformers' generate, a prompt's tokens then take the frequencies of the whole prompt's length
        and a later token those of the length it makes, whatever the chunks. None: seq_lens stands for the prompts'
        lengths, which is the same unless such a prompt is computed in several chunks. observe: is called in each layer.
        """
        rotation = self._rotation(batch, prompt_lens)
        if self._key_offsets is not None:
            self._key_offsets.cover(batch.block_table.shape[1] * cache.spec.block_size)
        residual = self._embedding.rows(batch.token_ids)
        hidden = rms_norm(residual, self._layers[0].input_norm, self.spec.rms_norm_eps)
        last = len(self._layers) - 1
        for layer in range(last):
            q = self._store_keys(layer, hidden, batch, rotation, cache, observe)
            hidden, residual = self._after_keys(layer, q, residual, batch, cache)
        q = self._store_keys(last, hidden, batch, rotation, cache, observe)
        if batch.wanted is None:
            return self._after_keys(last, q, residual, batch, cache)[0]
        wanted, stored = batch.wanted.tokens, cache.largest_stored(last, batch.slot_mapping)
        states = residual + (stored * 0).to(residual.dtype)[:, None]  # finite where both are
        if len(wanted):
            states[wanted], _ = self._after_keys(last, q[wanted], residual[wanted], batch.wanted, cache)
        return states

    def _store_keys(
        self,
        layer: int,
        hidden: Tensor,
        batch: Batch,
        rotation: StepRotation,
        cache: PagedKVCache,
        observe: ObserveQueries | None,
    ) -> Tensor:
        """Puts a layer's keys and values into the cache; returns its queries."""
        attention = self._layers[layer].attention
        q = attention.store(attention.project(hidden), batch, rotation, cache, self._known_keys(layer, cache))
        if observe is not None:
            observe(layer, q)
        return q

    def _after_keys(
        self, layer: int, q: Tensor, residual: Tensor, contexts: Contexts, cache: PagedKVCache
    ) -> tuple[Tensor, Tensor]:
        """What follows in a layer once keys and values are stored, for all tokens of a batch or those it wants: the
        next norm's result, and the residual."""
        own, eps = self._layers[layer], self.spec.rms_norm_eps
        attended = own.attention.attend(q, contexts, cache, self._known_keys(layer, cache))
        hidden, residual = add_rms_norm(attended, residual, own.post_attention_norm, eps)
        is_last = layer + 1 == len(self._layers)
        next_norm = self._final_norm if is_last else self._layers[layer + 1].input_norm
        return add_rms_norm(own.mlp(hidden), residual, next_norm, eps)

    def _known_keys(self, layer: int, cache: PagedKVCache) -> KnownKeys:
        offsets = self._key_offsets
        return offsets.tables(layer) if offsets and cache.spec.has_scales(layer) else (None, None)

    @torch.inference_mode()
    def compute_logits(self, hidden: Tensor, scratch: Tensor | None = None) -> Tensor:
        """hidden: [n, hidden_size], rows of forward's result. Returns [n, vocab_size], float32 where the head's sums
        are, else in the model's dtype. Rounding to bf16 would make likely tokens equal and change answers.

        scratch: an earlier float32 result that is read no more; its memory is used again where it suffices.
        """
        if isinstance(self._lm_head, Linear):
            return self._lm_head(hidden)
        if scratch is not None and len(scratch) >= len(hidden):
            logits = scratch[: len(hidden)]
        else:
            logits = torch.empty(len(hidden), self.vocab_size, device=self.device)
        self._lm_head.fill(logits, hidden)
        return logits

    def _rotation(self, batch: Batch, prompt_lens: Tensor | None) -> StepRotation:
        lengths = None
        if self.spec.rope.length_threshold is not None:
            of_sequence = batch.seq_lens if prompt_lens is None else prompt_lens
            q_lens = batch.cu_seqlens_q.diff().to(torch.int64)
            num_tokens = len(batch.positions)  # said, so that nobody waits for the device to add it up
            of_token = of_sequence.to(torch.int64).repeat_interleave(q_lens, output_size=num_tokens)
            lengths = torch.maximum(of_token, batch.positions + 1)
        rows = torch.arange(len(batch.positions), device=self.device)
        return StepRotation(self.rope.cos_sin(batch.positions, lengths), rows)
