"""The memory of the paged KV cache: a tensor of keys and one of values a layer, with their scales. Written by
kv_store, read by paged_attention; which block belongs to whom is block_pool's business."""

import math
import mmap
from collections.abc import Sequence

import torch
from torch import Tensor

from batchinfer.cache.host_pages import BlockForm, HostPages, huge_pages
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

    def __init__(
        self,
        spec: KVCacheSpec,
        num_blocks: int,
        device: torch.device | str = "cpu",
        pages: HostPages | None = None,
    ) -> None:
        """pages: memory of a CPU, reserved before, which is used where it fits."""
        self.spec = spec
        self.num_blocks = num_blocks
        places = (num_blocks, spec.num_kv_heads, spec.block_size)
        layers = range(spec.num_layers)
        dtypes = [TORCH_DTYPES[spec.layer_dtype(layer)] for layer in layers for _ in ("keys", "values")]
        shape = (*places, spec.head_dim)
        if torch.device(device).type == "cpu":
            tensors = _in_host_memory(spec, shape, dtypes, pages)
        else:
            tensors = [torch.empty(*shape, dtype=dtype, device=device) for dtype in dtypes]
        self._keys, self._values = tensors[::2], tensors[1::2]
        scaled = [layer for layer in layers if spec.has_scales(layer)]
        self._key_scales = {layer: _scales(places, device) for layer in scaled}
        self._value_scales = {layer: _scales(places, device) for layer in scaled}

    def key(self, layer: int) -> Tensor:
        """[num_blocks, num_kv_heads, block_size, head_dim] in the layer's storage dtype, each block contiguous."""
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

    def largest_stored(self, layer: int, slots: Tensor) -> Tensor:
        """float32 [n], not finite where a number, or a scale, is not that the layer holds in a slot: the largest
        magnitude there, not scaled. slots: int64 [n], block * block_size + offset."""
        places = (slots // self.spec.block_size, slice(None), slots % self.spec.block_size)
        found = [_taken(numbers, places).abs().amax((1, 2)) for numbers in (self.key(layer), self.value(layer))]
        scales = (self.key_scale(layer), self.value_scale(layer))
        found += [scale[places].abs().amax(1) for scale in scales if scale is not None]
        return torch.stack(found).amax(0)

    @property
    def nbytes(self) -> int:
        """Bytes of keys, values and scales in all layers."""
        scales = (*self._key_scales.values(), *self._value_scales.values())
        return sum(t.nbytes for t in (*self._keys, *self._values, *scales))


def _taken(numbers: Tensor, places: tuple[Tensor | slice, ...]) -> Tensor:
    """float32 numbers[places], of any storage dtype: torch indexes bytes, but not all kinds of floats."""
    is_byte = numbers.dtype.itemsize == 1
    taken = numbers.view(torch.uint8)[places].view(numbers.dtype) if is_byte else numbers[places]
    return taken.to(torch.float32)


def _in_host_memory(
    spec: KVCacheSpec, shape: tuple[int, ...], dtypes: Sequence[torch.dtype], pages: HostPages | None
) -> list[Tensor]:
    """Keys and values of each layer in turn, in blocks side by side. pages: as PagedKVCache's."""
    num_blocks, _, block_size, head_dim = shape
    form, reserved = BlockForm.of(spec), pages.memory(spec, num_blocks) if pages else None
    memory, tensors = reserved or huge_pages(form.num_bytes * num_blocks), []
    for dtype, offset in zip(dtypes, form.offsets, strict=True):
        block_stride = form.num_bytes // dtype.itemsize
        numbers = torch.frombuffer(memory, dtype=dtype, count=block_stride * num_blocks)
        strides = (block_stride, block_size * head_dim, head_dim, 1)
        tensors.append(numbers.as_strided(shape, strides, offset // dtype.itemsize))
    return tensors


def _scales(shape: Sequence[int], device: torch.device | str) -> Tensor:
    """Scales, which are so small that huge pages would mostly be empty."""
    if torch.device(device).type != "cpu":
        return torch.empty(*shape, dtype=torch.float32, device=device)
    memory = mmap.mmap(-1, math.prod(shape) * 4, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(memory, dtype=torch.float32).view(*shape)
