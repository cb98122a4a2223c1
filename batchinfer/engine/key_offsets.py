"""Measures what the keys of each layer have in common whatever the text: an 8-bit KV cache need not spend its few bits
on that. Called by executors/ where a model is loaded for such a cache."""

import numpy as np
import torch
from torch import Tensor

from batchinfer.cache.paged_kv import PagedKVCache
from batchinfer.engine.whole_sequences import blocks_needed, run_whole
from batchinfer.models.decoder import Decoder
from batchinfer.models.key_offsets import turn

_NUM_TOKENS = 256  # the mean's error is then a sixteenth of what sets keys apart
_SEED = 20_250_101


def measure_mean_keys(decoder: Decoder, block_size: int) -> list[Tensor | None]:
    """What Decoder.take_off_keys takes: the mean key of each layer and head before its rotation, over tokens drawn at
    random, the same for the same weights whatever a job's rows. None where the layer's keys are not finite, and in all
    layers where frequencies depend on the length of a sequence.

    block_size: of the cache that the tokens pass through, in the model's own precision.
    """
    spec = decoder.spec
    if spec.rope.length_threshold is not None:
        return [None] * spec.num_layers
    num_tokens = min(_NUM_TOKENS, spec.max_position_embeddings)
    token_ids = np.random.default_rng(_SEED).integers(decoder.vocab_size, size=num_tokens).astype(np.int32)
    num_blocks = blocks_needed([token_ids], block_size)
    cache = PagedKVCache(decoder.kv_cache_spec(block_size), num_blocks, decoder.device)
    run_whole(decoder, cache, [token_ids], block_size)
    cos_sin = decoder.rope.cos_sin(torch.arange(num_tokens, device=decoder.device))
    back = cos_sin / spec.rope.attention_factor**2  # the factor is in the keys, too
    back[:, back.shape[1] // 2 :] *= -1
    return [_mean(cache.key(layer), back) for layer in range(spec.num_layers)]


def _mean(keys: Tensor, back: Tensor) -> Tensor | None:
    """keys: [num_blocks, num_kv_heads, block_size, head_dim], rotated; back: what turns them back, [num_tokens,
    rotary_dim]."""
    by_token = keys.transpose(1, 2).flatten(0, 1)[: len(back)].to(torch.float32)
    mean = turn(by_token, back).mean(0)
    return mean if bool(mean.isfinite().all()) else None
