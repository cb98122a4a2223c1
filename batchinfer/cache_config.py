"""The options of the KV cache, declared as in config.py, of which they are a part: sizes, precision and the guard over
8-bit precision."""

import re
from dataclasses import dataclass
from typing import NamedTuple

from batchinfer.option_field import option, require, require_choice

NARROW_KV_CACHE_DTYPES = ("fp8", "fp8_e5m2", "int8")
KV_CACHE_DTYPES = ("auto", "bf16", "fp16", "fp32", *NARROW_KV_CACHE_DTYPES)
_LAYERS = re.compile(r"(\d{1,4})(?:-(\d{1,4}))?")
_GUARD = re.compile(r"\d+|strict(:\d+)?")
_GUARD_ROWS = 4


class KVGuardRules(NamedTuple):
    """What --kv-guard asks for."""

    num_rows: int  # 0: no guard
    is_strict: bool  # keep layers in 16 bits, where a warning would come otherwise


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheConfig:
    """The paged KV cache."""

    kv_cache_dtype: str = option(
        "auto",
        "auto is the precision of --dtype; fp8 is e4m3. fp8, fp8_e5m2 and int8 keep a scale for each token and head.",
        choices=KV_CACHE_DTYPES,
        affects_answers=True,
    )
    kv_cache_dtype_skip_layers: str = option(
        "",
        "Layers, counted from 0, that keep the precision of --dtype under an 8-bit --kv-cache-dtype.",
        metavar="A,B-C",
        affects_answers=True,
    )
    kv_guard: str = option(
        str(_GUARD_ROWS),
        "Under an 8-bit --kv-cache-dtype, first compare the logits of the first N rows' prompts with those of a cache "
        "in the precision of --dtype, and warn where they differ too much; strict keeps the worst layers in that "
        "precision until they do not. 0 in bench.",
        metavar="N|strict[:N]",
    )
    kv_cache_memory: int | None = option(
        None, "Size of the cache, as in 24MiB. Default: a share of the free memory.", kind="size", metavar="SIZE"
    )
    gpu_memory_utilization: float | None = option(
        None,
        "Share of the device's free memory that weights and cache may take. Default: 0.9 on a GPU, 0.5 on a CPU.",
        metavar="X",
    )
    explain_memory: bool = option(
        False, "Show what weights, activations, logits and cache take of the memory.", kind="flag"
    )
    block_size: int = option(16, "Tokens in a KV block.", metavar="N")
    enable_prefix_caching: bool = option(True, "Compute equal beginnings of prompts once.", kind="flag")

    def __post_init__(self) -> None:
        require_choice("kv_cache_dtype", self.kv_cache_dtype, KV_CACHE_DTYPES)
        share = self.gpu_memory_utilization
        require(share is None or 0 < share <= 1, "gpu_memory_utilization", share, "above 0 and at most 1")
        require(1 <= self.block_size <= 1024, "block_size", self.block_size, "from 1 to 1024")
        memory = self.kv_cache_memory
        require(memory is None or memory > 0, "kv_cache_memory", memory, "above 0")
        skipped = self.kv_cache_dtype_skip_layers
        narrow = ", ".join(NARROW_KV_CACHE_DTYPES)
        is_fit = not skipped or self.kv_cache_dtype in NARROW_KV_CACHE_DTYPES
        require(is_fit, "kv_cache_dtype_skip_layers", skipped, f"absent where kv_cache_dtype is none of {narrow}")
        require(None not in self._layer_ranges(), "kv_cache_dtype_skip_layers", skipped, "layer numbers as in 0,5-9")
        require(_GUARD.fullmatch(self.kv_guard) is not None, "kv_guard", self.kv_guard, "N, strict or strict:N")

    @property
    def skip_layers(self) -> tuple[int, ...]:
        """kv_cache_dtype_skip_layers as numbers, rising."""
        return tuple(sorted({layer for layers in self._layer_ranges() for layer in layers or ()}))

    def _layer_ranges(self) -> list[range | None]:
        """None for what is no layer or range of layers."""
        parts = self.kv_cache_dtype_skip_layers.split(",") if self.kv_cache_dtype_skip_layers else []
        matches = [_LAYERS.fullmatch(part.strip()) for part in parts]
        return [range(int(m[1]), int(m[2] or m[1]) + 1) or None if m else None for m in matches]

    @property
    def guard(self) -> KVGuardRules:
        """kv_guard in parts; no rows where the cache is not of 8 bits."""
        is_strict = self.kv_guard.startswith("strict")
        rows = self.kv_guard.removeprefix("strict").removeprefix(":") or _GUARD_ROWS
        return KVGuardRules(int(rows) if self.kv_cache_dtype in NARROW_KV_CACHE_DTYPES else 0, is_strict)
