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
        layers = range(spec.num_layers)
        dtypes = [TORCH_DTYPES[spec.layer_dtype(layer)] for layer in layers]
        self._keys = [_allocate((*places, spec.head_dim), dtype, device) for dtype in dtypes]
        self._values = [_allocate((*places, spec.head_dim), dtype, device) for dtype in dtypes]
        scaled = [layer for layer in layers if spec.has_scales(layer)]
        self._key_scales = {layer: _allocate(places, torch.float32, device, in_huge_pages=False) for layer in scaled}
        self._value_scales = {layer: _allocate(places, torch.float32, device, in_huge_pages=False) for layer in scaled}

    def key(self, layer: int) -> Tensor:
        """[num_blocks, num_kv_heads, block_size, head_dim] in the layer's storage dtype, contiguous."""
        return self._keys[layer]

    def value(self, layer: int) -> Tensor:
        """As `key`."""
        return self._values[layer]

    def key_scale(self, layer: int) -> Tensor | None:
        """float32 [num_blocks, num_kv_heads, block_size], or None where the layer has no scales."""
        return self._key_scales.get(layer)

    def value_scale(self, layer: int) -> Tensor | None:
        """As `key_scale`."""
        return self._value_scales.get(layer)

    @property
    def nbytes(self) -> int:
        """Bytes of keys, values and scales in all layers."""
        scales = (*self._key_scales.values(), *self._value_scales.values())
        return sum(t.nbytes for t in (*self._keys, *self._values, *scales))


def _allocate(
    shape: Sequence[int], dtype: torch.dtype, device: torch.device | str, in_huge_pages: bool = True
) -> Tensor:
    """On a CPU in huge pages where the system has them: a sequence's blocks lie far apart, and with small pages each
    step would look up thousands of addresses anew. Scales are so small that huge pages would mostly be empty."""
    if torch.device(device).type != "cpu" or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(*shape, dtype=dtype, device=device)
    memory = mmap.mmap(-1, math.prod(shape) * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if in_huge_pages:
        with suppress(OSError):  # a kernel without them
            memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype).view(*shape)
