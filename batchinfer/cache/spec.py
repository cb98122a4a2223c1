"""The shape and precision of the KV cache's layers, with their sizes in closed form. Used by paged_kv to allocate and
by executors to size the pool."""

from dataclasses import dataclass

ELEMENT_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8": 1, "fp8_e5m2": 1, "int8": 1}
SCALE_BYTES = 4  # float32


@dataclass(frozen=True, slots=True)
class KVCacheSpec:
    """Layers that share one block table.

    dtype: the storage format; `auto` has been resolved to the model's dtype before.
    per_token_scales: a float32 scale for each token and KV head is kept beside the keys and beside the values. Formats
    of 16 bits or more have none.
    static_scales: the checkpoint's own scales, one a layer or head, serve in its place; 8-bit formats alone have them.
    wide_layers: layers, rising, that are kept in wide_dtype instead, without scales: those whose answers 8 bits would
    change too much. A block then has more bytes in these layers, and the block ids stay the same for all.
    Raises ValueError naming the field and the allowed values.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int  # tokens
    dtype: str
    per_token_scales: bool
    wide_layers: tuple[int, ...] = ()
    wide_dtype: str = "bf16"
    static_scales: bool = False

    def __post_init__(self) -> None:
        for name in ("num_layers", "num_kv_heads", "head_dim", "block_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} = {getattr(self, name)}: must be 1 or more")
        if self.dtype not in ELEMENT_BYTES:
            raise ValueError(f"dtype = {self.dtype!r}: must be one of {', '.join(ELEMENT_BYTES)}")
        if self.per_token_scales and ELEMENT_BYTES[self.dtype] > 1:
            raise ValueError(f"per_token_scales = True: must be False for dtype {self.dtype}")
        if self.dtype == "int8" and not self.per_token_scales and not self.static_scales:
            raise ValueError("per_token_scales = False: must be True for dtype int8")
        if self.static_scales and (self.per_token_scales or ELEMENT_BYTES[self.dtype] > 1):
            raise ValueError("static_scales = True: must be False with per_token_scales and for 16 bits or more")
        if list(self.wide_layers) != sorted(set(self.wide_layers) & set(range(self.num_layers))):
            raise ValueError(f"wide_layers = {self.wide_layers}: must be rising, from 0 to {self.num_layers - 1}")
        if ELEMENT_BYTES.get(self.wide_dtype, 1) == 1:
            raise ValueError(f"wide_dtype = {self.wide_dtype!r}: must be one of fp32, bf16, fp16")

    @property
    def element_bytes(self) -> int:
        """Bytes of one key or value element outside the wide layers."""
        return ELEMENT_BYTES[self.dtype]

    def layer_dtype(self, layer: int) -> str:
        """The storage format of a layer."""
        return self.wide_dtype if layer in self.wide_layers else self.dtype

    def has_scales(self, layer: int) -> bool:
        """Whether a layer keeps a scale for each token and KV head."""
        return self.per_token_scales and layer not in self.wide_layers

    def has_static_scales(self, layer: int) -> bool:
        """Whether a layer's numbers stand for themselves times the checkpoint's scales."""
        return self.static_scales and layer not in self.wide_layers

    def bytes_per_token(self) -> int:
        """Bytes of one token's keys and values in all layers, scales included."""
        head_bytes = self.head_dim * self.element_bytes + (SCALE_BYTES if self.per_token_scales else 0)
        wide_bytes = self.head_dim * ELEMENT_BYTES[self.wide_dtype]
        num_wide = len(self.wide_layers)
        return 2 * self.num_kv_heads * ((self.num_layers - num_wide) * head_bytes + num_wide * wide_bytes)

    def bytes_per_block(self) -> int:
        return self.block_size * self.bytes_per_token()

    def num_blocks(self, memory_bytes: int) -> int:
        """Whole blocks that fit in `memory_bytes`."""
        return memory_bytes // self.bytes_per_block()

    def gain_over_16_bits(self) -> float:
        """How many times as many tokens fit in the same memory as with a 16-bit cache, scales counted."""
        bytes_16_bits = 2 * self.num_layers * self.num_kv_heads * self.head_dim * 2
        return bytes_16_bits / self.bytes_per_token()
