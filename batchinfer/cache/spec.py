"""The shape and precision of one group of KV cache layers, with its sizes in closed form. Used by paged_kv to allocate
and by executors to size the pool."""

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
    Raises ValueError naming the field and the allowed values.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int  # tokens
    dtype: str
    per_token_scales: bool
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

    @property
    def element_bytes(self) -> int:
        """Bytes of one key or value element."""
        return ELEMENT_BYTES[self.dtype]

    def has_static_scales(self, layer: int) -> bool:
        """Whether a layer's numbers stand for themselves times the checkpoint's scales."""
        return self.static_scales

    def bytes_per_token(self) -> int:
        """Bytes of one token's keys and values in all layers, scales included."""
        head_bytes = self.head_dim * self.element_bytes + (SCALE_BYTES if self.per_token_scales else 0)
        return 2 * self.num_layers * self.num_kv_heads * head_bytes

    def bytes_per_block(self) -> int:
        return self.block_size * self.bytes_per_token()

    def num_blocks(self, memory_bytes: int) -> int:
        """Whole blocks that fit in `memory_bytes`."""
        return memory_bytes // self.bytes_per_block()

    def gain_over_16_bits(self) -> float:
        """How many times as many tokens fit in the same memory as with a 16-bit cache, scales counted."""
        bytes_16_bits = 2 * self.num_layers * self.num_kv_heads * self.head_dim * 2
        return bytes_16_bits / self.bytes_per_token()
