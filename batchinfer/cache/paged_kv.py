"""The memory of the paged KV cache: a tensor of keys and one of values a layer, with their scales. Written by
kv_store, read by paged_attention; which block belongs to whom is block_pool's business."""

import math
import mmap
from collections.abc import Sequence
from contextlib import suppress

import torch
from torch import Tensor

from batchinfer.cache.spec import KVCacheSpec

TORCH_DTYPES = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
    "fp8": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
    "int8": torch.int8,
}


class PagedKVCache:
    """num_blocks blocks of all layers on one device. The memory is not initialised: readers must not look at places
    that nobody wrote, and the operating system gives pages only as they are written."""

    def __init__(self, spec: KVCacheSpec, num_blocks: int, device: torch.device | str = "cpu") -> None:
        self.spec = spec
        self.num_blocks = num_blocks
        places = (num_blocks, spec.num_kv_heads, spec.block_size)
        dtype = TORCH_DTYPES[spec.dtype]
        layers = range(spec.num_layers)
        self._keys = [_allocate((*places, spec.head_dim), dtype, device) for _ in layers]
        self._values = [_allocate((*places, spec.head_dim), dtype, device) for _ in layers]
        scaled = layers if spec.per_token_scales else range(0)
        self._key_scales = [_allocate(places, torch.float32, device) for _ in scaled]
        self._value_scales = [_allocate(places, torch.float32, device) for _ in scaled]

    def key(self, layer: int) -> Tensor:
        """[num_blocks, num_kv_heads, block_size, head_dim] in the storage dtype, contiguous."""
        return self._keys[layer]

    def value(self, layer: int) -> Tensor:
        """As `key`."""
        return self._values[layer]

    def key_scale(self, layer: int) -> Tensor | None:
        """float32 [num_blocks, num_kv_heads, block_size], or None where the spec has no scales."""
        return self._key_scales[layer] if self._key_scales else None

    def value_scale(self, layer: int) -> Tensor | None:
        """As `key_scale`."""
        return self._value_scales[layer] if self._value_scales else None

    @property
    def nbytes(self) -> int:
        """Bytes of keys, values and scales in all layers."""
        return sum(t.nbytes for t in (*self._keys, *self._values, *self._key_scales, *self._value_scales))


def _allocate(shape: Sequence[int], dtype: torch.dtype, device: torch.device | str) -> Tensor:
    """On a CPU in huge pages where the system has them: a sequence's blocks lie far apart, and with small pages each
    step would look up thousands of addresses anew."""
    if torch.device(device).type != "cpu" or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(*shape, dtype=dtype, device=device)
    memory = mmap.mmap(-1, math.prod(shape) * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a kernel without them
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype).view(*shape)
