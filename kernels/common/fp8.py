"""The 8-bit storage formats of the KV cache: their largest value, encoding with saturation and decoding. Used by
kv_store and paged_attention."""

import torch

# Largest finite value of a storage dtype that is written through a scale.
STORAGE_MAX = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0, torch.int8: 127.0}


def encode(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Rounds float32 values to a storage dtype of STORAGE_MAX, saturating.

    The clamp is explicit because casts of values beyond the maximum differ between stacks (448, NaN or wrapped).
    NaN stays NaN in the float formats; int8 has none, so there it becomes 0 and the scale must carry it.
    """
    limit = STORAGE_MAX[dtype]
    clamped = values.clamp(-limit, limit)
    if dtype == torch.int8:
        return clamped.nan_to_num(0.0).round().to(dtype)
    return clamped.to(dtype)


def decode_exactly(codes: torch.Tensor) -> torch.Tensor:
    """Storage codes to float32, NaN codes included."""
    return codes.to(torch.float32)


def decode_finite(codes: torch.Tensor) -> torch.Tensor:
    """Storage codes to float32 where NaN codes need not be told apart, because a NaN scale marks them.

    float8 codes are moved into the bits of a float16 (e4m3: bias 7 against 15, hence the factor 2^8), which on a CPU
    is some ten times faster than torch's conversion. Exact for each code that is not NaN, subnormal ones included.
    """
    if codes.dtype == torch.float8_e4m3fn:
        bits = codes.view(torch.int8).to(torch.int16)  # sign-extended: bits 7 to 15 hold the sign
        bits <<= 7
        bits &= ~0x4000
        return bits.view(torch.float16).to(torch.float32).mul_(256.0)
    if codes.dtype == torch.float8_e5m2:
        bits = codes.view(torch.int8).to(torch.int16)
        bits <<= 8
        return bits.view(torch.float16).to(torch.float32)
    return codes.to(torch.float32)


def is_per_token(scale: torch.Tensor | None) -> bool:
    """Whether a scale is one of a token and head, not a static one."""
    return scale is not None and scale.dim() == 3


def a_head(scale: torch.Tensor | None, num_kv_heads: int) -> torch.Tensor | None:
    """A static scale as a dense [num_kv_heads]; others as they are."""
    if scale is None or is_per_token(scale):
        return scale
    return scale.expand(num_kv_heads).contiguous()


def check_scales(cache: torch.Tensor, k_scale: torch.Tensor | None, v_scale: torch.Tensor | None) -> None:
    """Raises ValueError unless both scales are absent, both are float32 [num_blocks, num_kv_heads, block_size], or both
    are static: float32 [num_kv_heads] or [1]. A cache of 16 or 32 bits takes none; int8 needs them."""
    num_blocks, num_kv_heads, block_size, _ = cache.shape
    fitting = ((num_blocks, num_kv_heads, block_size), (num_kv_heads,), (1,))
    for scale in (k_scale, v_scale):
        if scale is None:
            continue
        if cache.dtype not in STORAGE_MAX:
            raise ValueError(f"a {cache.dtype} cache takes no scales")
        if tuple(scale.shape) not in fitting or scale.dtype != torch.float32:
            raise ValueError(f"{scale.dtype} scales {tuple(scale.shape)} do not fit the cache {tuple(cache.shape)}")
    if (k_scale is None) != (v_scale is None) or is_per_token(k_scale) != is_per_token(v_scale):
        raise ValueError("k_scale and v_scale must be of one kind: none, static, or a token and head")
    if k_scale is None and cache.dtype == torch.int8:
        raise ValueError("an int8 cache needs scales")
