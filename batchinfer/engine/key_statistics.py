"""Measures what is known of the keys of each layer whatever the text: an 8-bit KV cache need not spend its few bits on
what they have in common, and its errors should be where queries are small. Called by executors/ where a model is loaded
for such a cache."""

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from batchinfer.cache.paged_kv import PagedKVCache
from batchinfer.engine.whole_sequences import blocks_needed, run_whole
from batchinfer.models.batch import Batch
from batchinfer.models.decoder import Decoder
from batchinfer.models.key_offsets import KeyStatistics, pair_products, turn

_NUM_TOKENS = 256  # the mean's error is then a sixteenth of what sets keys apart
_FIRST = 4  # tokens before it count in no mean: what a model puts there is unlike what follows


@dataclass(frozen=True, slots=True)
class _Observed:
    """The decoder, with the queries of its last pass."""

    decoder: Decoder
    queries: dict[int, Tensor] = field(default_factory=dict)

    @property
    def device(self) -> torch.device:
        return self.decoder.device

    @property
    def vocab_size(self) -> int:
        return self.decoder.vocab_size

    def forward(self, batch: Batch, cache: PagedKVCache, prompt_lens: Tensor) -> Tensor:
        return self.decoder.forward(batch, cache, prompt_lens, self.queries.__setitem__)

    def compute_logits(self, hidden: Tensor, scratch: Tensor | None = None) -> Tensor:
        return self.decoder.compute_logits(hidden, scratch)


def measure_keys(decoder: Decoder, token_ids: npt.NDArray[np.int32], block_size: int) -> list[KeyStatistics | None]:
    """What Decoder.take_off_keys takes, from the first 256 of the tokens. None where a layer's numbers are not finite,
    in all layers where frequencies depend on the length of a sequence, and where there are too few tokens.

    block_size: of the cache that the tokens pass through, in the model's own precision.
    """
    spec = decoder.spec
    token_ids = token_ids[: min(_NUM_TOKENS, spec.max_position_embeddings)]
    if spec.rope.length_threshold is not None or len(token_ids) <= _FIRST:
        return [None] * spec.num_layers
    cache = PagedKVCache(decoder.kv_cache_spec(block_size), blocks_needed([token_ids], block_size), decoder.device)
    model = _Observed(decoder)
    run_whole(model, cache, [token_ids], block_size)
    cos_sin = decoder.rope.cos_sin(torch.arange(len(token_ids), device=decoder.device))
    back = cos_sin / spec.rope.attention_factor**2  # the factor is in keys and queries, too
    back[:, back.shape[1] // 2 :] *= -1
    return [_statistics(cache.key(layer), model.queries[layer], back) for layer in range(spec.num_layers)]


def _statistics(keys: Tensor, queries: Tensor, back: Tensor) -> KeyStatistics | None:
    """keys: [num_blocks, num_kv_heads, block_size, head_dim], rotated, as queries are; back: what turns them back,
    [num_tokens, rotary_dim]."""
    by_token = keys.transpose(1, 2).flatten(0, 1)[: len(back)].to(torch.float32)
    mean = turn(by_token, back)[_FIRST:].mean(0)
    q = turn(queries.to(torch.float32), back)[_FIRST:].unflatten(1, (keys.shape[1], -1))
    squares, products = q.square().mean((0, 2)), pair_products(q, back.shape[1]).mean((0, 2))
    is_usable = torch.stack((mean, squares, products)).isfinite().all() & (squares.sum(-1) > 0).all()
    return KeyStatistics(mean, squares, products) if bool(is_usable) else None
