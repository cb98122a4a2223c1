"""PagedKVCache: layout, scales and size."""

import mmap
import re
from pathlib import Path

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
            assert all(block.is_contiguous() and block.data_ptr() % 64 == 0 for block in tensor)
        for scale in (cache.key_scale(layer), cache.value_scale(layer)):
            assert (scale is not None) == scaled
            if scale is not None:
                assert scale.shape == (5, 2, 8)
                assert scale.dtype == torch.float32
    starts = {t.data_ptr() for layer in range(3) for t in (cache.key(layer), cache.value(layer))}
    assert len(starts) == 6


def test_a_device_s_keys_and_values_are_contiguous_as_its_kernels_read_them():
    spec = KVCacheSpec(num_layers=2, num_kv_heads=2, head_dim=20, block_size=8, dtype="fp8", per_token_scales=True)
    cache = PagedKVCache(spec, 5, "meta")
    assert all(cache.key(layer).is_contiguous() and cache.value(layer).is_contiguous() for layer in range(2))
    assert cache.nbytes == 5 * spec.bytes_per_block()


def test_wide_layers_have_their_own_format_and_no_scales():
    spec = KVCacheSpec(3, 2, 20, 8, "fp8", True, wide_layers=(1,), wide_dtype="fp16")
    cache = PagedKVCache(spec, num_blocks=5)
    assert [cache.key(layer).dtype for layer in range(3)] == [torch.float8_e4m3fn, torch.float16, torch.float8_e4m3fn]
    assert [cache.value(layer).dtype for layer in range(3)] == [cache.key(layer).dtype for layer in range(3)]
    assert [cache.key_scale(layer) is None for layer in range(3)] == [False, True, False]
    assert [cache.value_scale(layer) is None for layer in range(3)] == [False, True, False]
    assert cache.nbytes == 5 * spec.bytes_per_block()


@pytest.mark.skipif(not hasattr(mmap, "MADV_HUGEPAGE"), reason="a system without huge pages")
def test_memory_asks_for_huge_pages_and_is_not_touched():
    spec = KVCacheSpec(num_layers=1, num_kv_heads=4, head_dim=64, block_size=16, dtype="bf16", per_token_scales=False)
    before = resident_bytes()
    cache = PagedKVCache(spec, num_blocks=1 << 17)  # 2 GiB
    assert resident_bytes() - before < 64 << 20
    assert "hg" in mapping_flags(cache.key(0).data_ptr())


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


def mapping_flags(address: int) -> list[str]:
    """The flags of the mapping that holds the address, as proc(5) names them."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            first, last = (int(end, 16) for end in line.split()[0].split("-"))
            inside = first <= address < last
        elif inside and line.startswith("VmFlags:"):
            return line.split()[1:]
    raise AssertionError("no mapping holds the address")
