"""PagedKVCache: layout, scales and size."""

import pytest
import torch

from batchinfer.cache.paged_kv import PagedKVCache
from batchinfer.cache.spec import KVCacheSpec


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("bf16", torch.bfloat16),
        ("fp16", torch.float16),
        ("fp32", torch.float32),
        ("fp8", torch.float8_e4m3fn),
        ("fp8_e5m2", torch.float8_e5m2),
        ("int8", torch.int8),
    ],
)
def test_layout_and_size(name, dtype):
    scaled = dtype.itemsize == 1
    spec = KVCacheSpec(num_layers=3, num_kv_heads=2, head_dim=20, block_size=8, dtype=name, per_token_scales=scaled)
    cache = PagedKVCache(spec, num_blocks=5)
    assert cache.nbytes == 5 * spec.bytes_per_block()
    for layer in range(3):
        for tensor in (cache.key(layer), cache.value(layer)):
            assert tensor.shape == (5, 2, 8, 20)
            assert tensor.dtype == dtype
            assert tensor.is_contiguous()
        for scale in (cache.key_scale(layer), cache.value_scale(layer)):
            assert (scale is not None) == scaled
            if scale is not None:
                assert scale.shape == (5, 2, 8)
                assert scale.dtype == torch.float32
    starts = {t.data_ptr() for layer in range(3) for t in (cache.key(layer), cache.value(layer))}
    assert len(starts) == 6
