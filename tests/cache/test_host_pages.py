"""HostPages: room without memory, memory ahead of need, and when it is used."""

import ctypes
import mmap
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from batchinfer.cache.host_pages import BlockForm, HostPages
from batchinfer.cache.paged_kv import PagedKVCache
from batchinfer.cache.spec import KVCacheSpec

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux tells what is resident")
SPEC = KVCacheSpec(num_layers=2, num_kv_heads=4, head_dim=64, block_size=16, dtype="bf16", per_token_scales=False)
KEYS = 16 * 4 * 64 * 2  # bytes of a block's keys in a layer


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


def ended(pages: HostPages) -> None:
    assert pages._thread is not None
    pages._thread.join(30)
    assert not pages._thread.is_alive()


def test_only_what_is_asked_for_takes_memory():
    before = resident_bytes()
    pages = HostPages(SPEC, most_blocks=1 << 15)  # 4 GiB
    assert resident_bytes() - before < 16 << 20
    pages.ask_for(lambda: 1000)
    ended(pages)
    taken = resident_bytes() - before
    assert 1000 * 4 * KEYS <= taken < 1000 * 4 * KEYS + (4 << 20) + (8 << 20)  # a huge page at each end
    memory = pages.memory(SPEC, 1 << 15)
    assert memory is not None
    assert not any(memory[0 : 1000 * 4 * KEYS : 4096])


def test_no_more_than_there_is_room_for():
    pages = HostPages(SPEC, most_blocks=10)
    pages.ask_for(lambda: 1 << 40)
    ended(pages)
    memory = pages.memory(SPEC, 10)
    assert memory is not None
    assert len(memory) == 10 * 4 * KEYS


def test_what_was_written_after_the_wait_stays():
    pages = HostPages(SPEC, most_blocks=4000)
    pages.ask_for(lambda: 4000)
    while not pages._is_counted:
        time.sleep(0.001)
    pages.wait()
    cache = PagedKVCache(SPEC, 4000, pages=pages)
    for layer in range(2):
        cache.key(layer).fill_(1)
        cache.value(layer).fill_(2)
    time.sleep(0.1)
    assert all((cache.key(layer) == 1).all() and (cache.value(layer) == 2).all() for layer in range(2))


def test_what_is_not_counted_when_the_cache_is_there_is_never_written():
    counts = threading.Event()
    pages = HostPages(SPEC, most_blocks=100)
    pages.ask_for(lambda: counts.wait(30) and 100)
    pages.wait()  # at once
    cache = PagedKVCache(SPEC, 100, pages=pages)
    cache.key(0).fill_(1)
    counts.set()
    ended(pages)
    assert (cache.key(0) == 1).all()


def test_a_thread_that_is_stopped_leaves_the_rest():
    before = resident_bytes()
    pages = HostPages(SPEC, most_blocks=1 << 15)
    pages.stop()
    pages.ask_for(lambda: 1 << 15)
    ended(pages)
    assert resident_bytes() - before < 16 << 20


def test_a_fault_in_counting_leaves_the_pages_to_their_first_writes():
    def fails() -> int:
        raise OSError("the shard went away")

    before = resident_bytes()
    pages = HostPages(SPEC, most_blocks=1 << 12)
    pages.ask_for(fails)
    ended(pages)
    assert resident_bytes() - before < 16 << 20
    PagedKVCache(SPEC, 1 << 12, pages=pages).key(0)[5] = 1


def test_a_cache_lies_in_reserved_pages_where_it_fits():
    pages = HostPages(SPEC, most_blocks=7)
    memory = pages.memory(SPEC, 5)
    assert memory is not None
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    cache = PagedKVCache(SPEC, 5, pages=pages)
    tensors = [t for layer in range(2) for t in (cache.key(layer), cache.value(layer))]
    assert [t.data_ptr() for t in tensors] == [start + KEYS * i for i in range(4)]
    assert all(t.stride(0) * t.itemsize == 4 * KEYS and t[4].is_contiguous() for t in tensors)
    assert all(t.shape == (5, 4, 16, 64) and t.dtype == torch.bfloat16 for t in tensors)
    assert cache.nbytes == 5 * SPEC.bytes_per_block()


@pytest.mark.parametrize(
    ("spec", "num_blocks"),
    [
        (SPEC, 8),
        (KVCacheSpec(2, 4, 64, 16, "fp32", False), 5),
        (KVCacheSpec(3, 4, 64, 16, "bf16", False), 5),
        (KVCacheSpec(2, 4, 64, 16, "bf16", False, wide_layers=(1,), wide_dtype="fp32"), 5),
    ],
    ids=["more blocks", "wider", "more layers", "a wide layer"],
)
def test_another_cache_gets_memory_of_its_own(spec, num_blocks):
    pages = HostPages(SPEC, most_blocks=7)
    assert pages.memory(spec, num_blocks) is None
    cache = PagedKVCache(spec, num_blocks, pages=pages)
    assert cache.nbytes == num_blocks * spec.bytes_per_block()
    cache.key(0).fill_(1)


def test_scales_are_no_part_of_the_pages():
    plain = KVCacheSpec(2, 4, 64, 16, "fp8", per_token_scales=False)
    scaled = KVCacheSpec(2, 4, 64, 16, "fp8", per_token_scales=True)
    assert HostPages(scaled, 3).memory(plain, 3) is not None


def test_each_layer_s_part_of_a_block_begins_at_a_cache_line_and_overlaps_no_other():
    spec = KVCacheSpec(3, 1, 5, 3, "int8", per_token_scales=True, wide_layers=(1,), wide_dtype="fp32")
    assert BlockForm.of(spec) == BlockForm((0, 64, 128, 192, 256, 320), 384)  # 15 numbers, of 60 bytes in layer 1
    cache = PagedKVCache(spec, 4)
    tensors = [t for layer in range(3) for t in (cache.key(layer), cache.value(layer))]
    for number, tensor in enumerate(tensors):
        tensor.fill_(number)
    assert [sorted(set(t.flatten().tolist())) for t in tensors] == [[number] for number in range(6)]
