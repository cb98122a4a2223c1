"""Sizes of the attention kernels' tiles on each generation of devices. Fixed in advance: nothing is tuned at run
time."""

import torch
from batchinfer.kernels.common import triton_targets
from batchinfer.kernels.paged_attention.segments import rows_of_tile

Sizes = tuple[int, int, dict[str, int]]  # rows of queries, keys, options of the launch

# For heads of up to 64, 128 and 256 dimensions.
_CHUNKS: dict[str, tuple[Sizes, Sizes, Sizes]] = {
    "ampere": (
        (128, 64, {"num_warps": 8, "num_stages": 3}),
        (128, 64, {"num_warps": 8, "num_stages": 2}),
        (64, 32, {"num_warps": 4, "num_stages": 2}),
    ),
    "ampere, codes": (  # taking them apart needs registers
        (64, 32, {"num_warps": 8, "num_stages": 1}),
        (64, 32, {"num_warps": 8, "num_stages": 1}),
        (64, 16, {"num_warps": 4, "num_stages": 1}),
    ),
    "small": (
        (128, 32, {"num_warps": 4, "num_stages": 2}),
        (64, 32, {"num_warps": 4, "num_stages": 2}),
        (64, 16, {"num_warps": 4, "num_stages": 1}),
    ),
    "small, codes": (
        (64, 32, {"num_warps": 4, "num_stages": 2}),
        (64, 32, {"num_warps": 8, "num_stages": 1}),
        (64, 16, {"num_warps": 4, "num_stages": 1}),
    ),
    "hopper": (
        (128, 128, {"num_warps": 8, "num_stages": 2}),
        (128, 64, {"num_warps": 8, "num_stages": 2}),
        (128, 32, {"num_warps": 8, "num_stages": 2}),
    ),
    "hopper, codes": (
        (128, 64, {"num_warps": 8, "num_stages": 2}),
        (128, 64, {"num_warps": 8, "num_stages": 2}),
        (128, 32, {"num_warps": 8, "num_stages": 2}),
    ),
    "blackwell": (
        (128, 128, {"num_warps": 8, "num_stages": 2}),
        (128, 64, {"num_warps": 8, "num_stages": 2}),
        (128, 32, {"num_warps": 8, "num_stages": 2}),
    ),
    "blackwell, codes": (
        (128, 64, {"num_warps": 8, "num_stages": 2}),
        (128, 64, {"num_warps": 8, "num_stages": 2}),
        (128, 32, {"num_warps": 8, "num_stages": 2}),
    ),
    "cdna3": (
        (128, 64, {"num_warps": 4, "num_stages": 1}),
        (128, 32, {"num_warps": 4, "num_stages": 1}),
        (64, 16, {"num_warps": 4, "num_stages": 1}),
    ),
}
_SINGLE: dict[str, tuple[int, dict[str, int]]] = {
    "ampere": (64, {"num_warps": 4, "num_stages": 3}),
    "small": (32, {"num_warps": 4, "num_stages": 2}),
    "hopper": (64, {"num_warps": 4, "num_stages": 3}),
    "blackwell": (64, {"num_warps": 4, "num_stages": 3}),
    "cdna3": (32, {"num_warps": 4, "num_stages": 1}),
}
_EXACT = (16, 32, {"num_warps": 4, "num_stages": 1})  # float32, which no matrix instruction takes as it is


def attention_sizes(dim_block: int, group: int, dtype: torch.dtype, has_codes: bool) -> tuple[Sizes, Sizes]:
    """Of tiles with several queries of a sequence, and with one. group: query heads of a KV head; has_codes: the cache
    has 8 bits."""
    generation = triton_targets.current().generation
    least = rows_of_tile(group)
    if dtype == torch.float32:
        rows, keys, options = _EXACT
        sizes = max(rows, least), keys, options
        return sizes, sizes
    chunks = _CHUNKS.get(f"{generation}, codes", _CHUNKS[generation]) if has_codes else _CHUNKS[generation]
    rows, keys, options = chunks[0 if dim_block <= 64 else 1 if dim_block <= 128 else 2]
    single_keys, single_options = _SINGLE[generation]
    if dim_block > 128:
        single_keys //= 2
    elif dim_block <= 64:
        single_keys = max(single_keys, 64)  # enough for each thread to load 16 bytes at once
    return (max(rows, least), keys, options), (least, single_keys, single_options)
