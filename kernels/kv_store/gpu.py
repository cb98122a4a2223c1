"""Triton backend of kv_store and rotary_kv_store: a program for each token and tensor."""

# Kernels have types of their own.
# mypy: allow-untyped-defs

import torch
import triton
import triton.language as tl
from batchinfer.kernels.common.triton_codes import as_bytes, code_of, encode, largest_code, rounding_error
from batchinfer.kernels.common.triton_rotate import load_rest, load_rotated, rotate_token, rotation_sizes
from batchinfer.kernels.common.triton_targets import FUSED
from batchinfer.kernels.kv_store.reference import SCALE_STEPS

_SCALE_STEPS: tl.constexpr = tl.constexpr(SCALE_STEPS)
_LEAST_SCALE: tl.constexpr = tl.constexpr(torch.finfo(torch.float32).tiny)


@triton.jit
def _kv_store(
    k_ptr,  # [num_tokens, KV_HEADS, HEAD_DIM], strided, as v
    v_ptr,
    k_cache_ptr,  # [num_blocks, KV_HEADS, BLOCK_SIZE, HEAD_DIM], bytes where CODE is given, as v_cache
    v_cache_ptr,
    slots_ptr,  # int64 [num_tokens]
    k_scale_ptr,  # float32 [num_blocks, KV_HEADS, BLOCK_SIZE] or None, as v_scale
    v_scale_ptr,
    k_token_stride,
    k_head_stride,
    v_token_stride,
    v_head_stride,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    CODE: tl.constexpr,
    LARGEST: tl.constexpr,
    KV_BLOCK: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + token)
    if slot >= 0:
        row = _row(slot, KV_HEADS, BLOCK_SIZE, KV_BLOCK)
        if tl.program_id(1) == 0:
            x = k_ptr + token * k_token_stride
            _store(x, k_head_stride, k_cache_ptr, k_scale_ptr, row, KV_HEADS, HEAD_DIM, CODE, LARGEST, DIM_BLOCK)
        else:
            x = v_ptr + token * v_token_stride
            _store(x, v_head_stride, v_cache_ptr, v_scale_ptr, row, KV_HEADS, HEAD_DIM, CODE, LARGEST, DIM_BLOCK)


@triton.jit
def _rotary_kv_store(
    q_ptr,  # [num_tokens, Q_HEADS, HEAD_DIM], strided
    k_ptr,  # this and the next six as _kv_store's
    v_ptr,
    k_cache_ptr,
    v_cache_ptr,
    slots_ptr,
    k_scale_ptr,
    v_scale_ptr,
    q_out_ptr,  # [num_tokens, Q_HEADS, HEAD_DIM], contiguous
    positions_ptr,  # int64 [num_tokens]
    cos_sin_ptr,  # float32 [rows, ROTARY_DIM]
    token_strides,  # of q, k and v
    head_strides,
    Q_HEADS: tl.constexpr,
    Q_BLOCK: tl.constexpr,
    KV_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    CODE: tl.constexpr,
    LARGEST: tl.constexpr,
    KV_BLOCK: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    REST: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    table = cos_sin_ptr + tl.load(positions_ptr + token) * ROTARY_DIM
    if tl.program_id(1) == 0:
        source = q_ptr + token * token_strides[0]
        out = q_out_ptr + token * (Q_HEADS * HEAD_DIM)
        rotate_token(source, head_strides[0], table, out, Q_HEADS, HEAD_DIM, ROTARY_DIM, Q_BLOCK, BLOCK, REST)
    else:
        slot = tl.load(slots_ptr + token)
        if slot >= 0:
            row = _row(slot, KV_HEADS, BLOCK_SIZE, KV_BLOCK)
            if tl.program_id(1) == 1:
                x = k_ptr + token * token_strides[1]
                _store_rotated(
                    *(x, head_strides[1], table, k_cache_ptr, k_scale_ptr, row),
                    *(KV_HEADS, HEAD_DIM, ROTARY_DIM, CODE, LARGEST, KV_BLOCK, BLOCK, REST),
                )
            else:
                x, stride = v_ptr + token * token_strides[2], head_strides[2]
                _store(x, stride, v_cache_ptr, v_scale_ptr, row, KV_HEADS, HEAD_DIM, CODE, LARGEST, DIM_BLOCK)


@triton.jit
def _row(slot, KV_HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr, KV_BLOCK: tl.constexpr):
    """int64 [KV_BLOCK, 1]: place of each head's vector in the cache seen as [-1, HEAD_DIM]."""
    head = tl.arange(0, KV_BLOCK)[:, None]
    return (slot // BLOCK_SIZE * KV_HEADS + head) * BLOCK_SIZE + slot % BLOCK_SIZE


@triton.jit
def _store(
    x_ptr,
    head_stride,
    cache_ptr,
    scale_ptr,
    row,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    CODE: tl.constexpr,
    LARGEST: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
):
    x = load_rest(x_ptr, head_stride, KV_HEADS, 0, HEAD_DIM, row.shape[0], DIM_BLOCK)
    scale = _scale(_largest(x), x, x, x, 1, scale_ptr, row, KV_HEADS, CODE, LARGEST)
    _write(x, scale, cache_ptr, row, 0, HEAD_DIM, KV_HEADS, HEAD_DIM, CODE, LARGEST)


@triton.jit
def _store_rotated(
    x_ptr,
    head_stride,
    table,
    cache_ptr,
    scale_ptr,
    row,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    CODE: tl.constexpr,
    LARGEST: tl.constexpr,
    KV_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
    REST: tl.constexpr,
):
    half: tl.constexpr = ROTARY_DIM // 2
    first, second = load_rotated(x_ptr, head_stride, table, KV_HEADS, ROTARY_DIM, KV_BLOCK, BLOCK)
    most = _larger(_largest(first), _largest(second))
    if REST > 0:
        rest = load_rest(x_ptr, head_stride, KV_HEADS, ROTARY_DIM, HEAD_DIM, KV_BLOCK, REST)
        most = _larger(most, _largest(rest))
        scale = _scale(most, first, second, rest, 3, scale_ptr, row, KV_HEADS, CODE, LARGEST)
        _write(rest, scale, cache_ptr, row, ROTARY_DIM, HEAD_DIM, KV_HEADS, HEAD_DIM, CODE, LARGEST)
    else:
        scale = _scale(most, first, second, first, 2, scale_ptr, row, KV_HEADS, CODE, LARGEST)
    _write(first, scale, cache_ptr, row, 0, half, KV_HEADS, HEAD_DIM, CODE, LARGEST)
    _write(second, scale, cache_ptr, row, half, ROTARY_DIM, KV_HEADS, HEAD_DIM, CODE, LARGEST)


@triton.jit
def _largest(x):
    """float32 [heads, 1]: largest magnitude, NaN where there is one."""
    magnitude = tl.abs(x.to(tl.float32))
    has_nan = tl.max((magnitude != magnitude).to(tl.int32), axis=1, keep_dims=True)
    return tl.where(has_nan > 0, float("nan"), tl.max(magnitude, axis=1, keep_dims=True))


@triton.jit
def _larger(a, b):
    return tl.where(a != a, a, tl.where(b != b, b, tl.maximum(a, b)))


@triton.jit
def _scale(
    most,  # float32 [heads, 1], largest magnitude of each head
    a,  # [heads, values]: the PIECES first of these three are a head's values
    b,
    c,
    PIECES: tl.constexpr,
    scale_ptr,
    row,
    KV_HEADS: tl.constexpr,
    CODE: tl.constexpr,
    LARGEST: tl.constexpr,
):
    """Writes and returns the scale of each head's vector, as the reference chooses it; 1 where the cache has none."""
    if scale_ptr is None:
        best = tl.full(row.shape, 1.0, tl.float32)
    else:
        least = tl.math.div_rn(most, tl.full(row.shape, LARGEST, tl.float32))
        least = tl.where(least < _LEAST_SCALE, _LEAST_SCALE, least)  # NaN stays
        best = least
        if CODE != "int8":
            best_error = tl.full(row.shape, float("inf"), tl.float32)
            for i in tl.static_range(8):
                inverse = tl.math.div_rn(tl.full(row.shape, 1.0, tl.float32), least * _SCALE_STEPS[i])
                error = rounding_error(a, inverse, CODE)
                if PIECES > 1:
                    error += rounding_error(b, inverse, CODE)
                if PIECES > 2:
                    error += rounding_error(c, inverse, CODE)
                error *= _SCALE_STEPS[i] * _SCALE_STEPS[i]
                best = tl.where(error < best_error, least * _SCALE_STEPS[i], best)
                best_error = tl.where(error < best_error, error, best_error)
        tl.store(scale_ptr + row, best, tl.arange(0, row.shape[0])[:, None] < KV_HEADS)
    return best


@triton.jit
def _write(
    x,
    scale,
    cache_ptr,
    row,
    FIRST: tl.constexpr,
    END: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    CODE: tl.constexpr,
    LARGEST: tl.constexpr,
):
    """Dimensions FIRST to END of each head."""
    place = FIRST + tl.arange(0, x.shape[1])[None, :]
    at = cache_ptr + row * HEAD_DIM + place
    mask = (tl.arange(0, x.shape[0])[:, None] < KV_HEADS) & (place < END)
    if CODE == "":
        tl.store(at, x.to(cache_ptr.dtype.element_ty), mask)
    else:
        wide = x.to(tl.float32)
        tl.store(at, encode(tl.math.div_rn(wide, tl.broadcast_to(scale, wide.shape)), CODE, LARGEST), mask)


def _sizes(k_cache: torch.Tensor) -> dict[str, int | float | str]:
    _, num_kv_heads, block_size, head_dim = k_cache.shape
    return {
        "KV_HEADS": num_kv_heads,
        "BLOCK_SIZE": block_size,
        "CODE": code_of(k_cache.dtype),
        "LARGEST": largest_code(k_cache.dtype),
        "KV_BLOCK": triton.next_power_of_2(num_kv_heads),
        "DIM_BLOCK": triton.next_power_of_2(head_dim),
    }


def _dense_heads(x: torch.Tensor) -> torch.Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def kv_store(
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
) -> None:
    """See the package's `kv_store`."""
    k, v = _dense_heads(k), _dense_heads(v)
    if len(k):
        _kv_store[(len(k), 2)](
            *(k, v, as_bytes(k_cache), as_bytes(v_cache), slot_mapping, k_scale, v_scale),
            *(*k.stride()[:2], *v.stride()[:2]),
            **_sizes(k_cache),
            HEAD_DIM=k_cache.shape[3],
            **FUSED,
        )


def rotary_kv_store(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    positions: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
) -> torch.Tensor:
    """See the package's `rotary_kv_store`."""
    q, k, v = (_dense_heads(x) for x in (q, k, v))
    q_out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if len(q):
        _rotary_kv_store[(len(q), 3)](
            *(q, k, v, as_bytes(k_cache), as_bytes(v_cache), slot_mapping, k_scale, v_scale),
            *(q_out, positions, cos_sin_cache.contiguous()),
            *(tuple(x.stride(axis) for x in (q, k, v)) for axis in (0, 1)),
            Q_HEADS=q.shape[1],
            Q_BLOCK=triton.next_power_of_2(q.shape[1]),
            **_sizes(k_cache),
            **rotation_sizes(q.shape[2], cos_sin_cache.shape[1]),
            **FUSED,
        )
    return q_out
