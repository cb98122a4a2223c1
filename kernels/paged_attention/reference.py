"""Plain torch specification of paged_attention, fast enough to run small models on a CPU.

Queries are cut into tiles that start at fixed positions, keys into chunks that start at fixed positions, and both have
all sums run in the same order whatever stands beside them. So a token's result depends on its own sequence and position
only, not on the batch or on how its sequence was cut into steps.
"""

import math
from dataclasses import dataclass

import torch
from batchinfer.kernels.common.fp8 import STORAGE_MAX, decode_exactly, decode_finite, is_per_token
from batchinfer.kernels.common.key_offset import SEGMENT
from batchinfer.kernels.paged_attention.variant import Variant

KEY_CHUNK = 128  # keys a chunk
KEY_STEP = 16  # the last chunk of a group of tiles is cut to a multiple of this
TILE_ROWS = 128  # most rows (queries x query heads of one KV head) a tile
ROW_MULTIPLE = 4  # products of other numbers of rows take code with other rounding, so decode would not equal prefill
GROUP_ELEMENTS = 3 << 18  # float32 values of keys that are gathered at once: they should stay in the processor's cache
LOWEST = torch.finfo(torch.float32).min


@dataclass(frozen=True, slots=True)
class _Tiles:
    """Runs of up to `width` queries of one sequence. Tensors are int64, on the device of the batch."""

    sequence: torch.Tensor  # [n]
    position: torch.Tensor  # [n] of the tile's first query, a multiple of the width
    rows: torch.Tensor  # [n, width] row of each query in q; a neighbour's where the tile is not full
    is_query: torch.Tensor  # [n, width] bool
    first_chunk: torch.Tensor  # [n] first chunk of keys that a query of the tile may see
    num_keys: torch.Tensor  # [n] from the first of that chunk to the tile's last position

    def select(self, which: torch.Tensor | slice) -> "_Tiles":
        fields = (self.sequence, self.position, self.rows, self.is_query, self.first_chunk, self.num_keys)
        return _Tiles(*(field[which] for field in fields))


@dataclass(frozen=True, slots=True)
class _Keys:
    """The cache, how sequences lie in it and how they are attended to."""

    k_cache: torch.Tensor
    v_cache: torch.Tensor
    k_scale: torch.Tensor | None
    v_scale: torch.Tensor | None
    block_table: torch.Tensor
    seq_lens: torch.Tensor  # int64
    variant: Variant


@dataclass(frozen=True, slots=True)
class _Chunk:
    """Where a chunk of each tile's keys lies. A piece is a run of tokens that divides a block."""

    positions: torch.Tensor  # int64 [n, length]
    # Block, head and place in the block of each piece, in pieces; together [n, num_kv_heads, length / piece].
    places: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    piece: int  # tokens
    unwritten: tuple[torch.Tensor, ...]  # (tile, place in the chunk) of each position beyond its sequence's end


def paged_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    seq_lens: torch.Tensor,
    k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
    variant: Variant,
) -> torch.Tensor:
    """See the package's `paged_attention`."""
    keys = _Keys(k_cache, v_cache, k_scale, v_scale, block_table, seq_lens.to(torch.int64), variant)
    offsets = cu_seqlens_q.to(torch.int64)
    q_lens = offsets[1:] - offsets[:-1]
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    heads_per_kv = q.shape[1] // k_cache.shape[1]
    for width, chosen in ((1, q_lens == 1), (_tile_width(heads_per_kv), q_lens > 1)):
        sequences = chosen.nonzero()[:, 0]
        if len(sequences):
            tiles = _make_tiles(sequences, offsets, q_lens, keys, width)
            _attend(q, out, tiles, keys)
    return out


def _tile_width(heads_per_kv: int) -> int:
    """The largest power of two of queries within TILE_ROWS; it divides KEY_CHUNK."""
    return 1 << max(0, (TILE_ROWS // heads_per_kv).bit_length() - 1)


def _make_tiles(
    sequences: torch.Tensor, offsets: torch.Tensor, q_lens: torch.Tensor, keys: _Keys, width: int
) -> _Tiles:
    """The tiles of some sequences, those with the most keys first."""
    starts = (keys.seq_lens - q_lens)[sequences]
    ends = keys.seq_lens[sequences]
    counts = (ends - 1) // width - starts // width + 1
    owner = torch.repeat_interleave(torch.arange(len(sequences), device=counts.device), counts)
    nth = torch.arange(len(owner), device=counts.device) - (counts.cumsum(0) - counts)[owner]
    position = (starts[owner] // width + nth) * width
    at = position[:, None] + torch.arange(width, device=counts.device)
    start, end = starts[owner][:, None], ends[owner][:, None]
    rows = offsets[sequences[owner]][:, None] + (at.clamp(start, end - 1) - start)
    is_query = (at >= start) & (at < end)
    window = keys.variant.sliding_window
    first_chunk = (position - (position if window is None else window - 1)).clamp_min(0) // KEY_CHUNK
    num_keys = position + width - first_chunk * KEY_CHUNK
    tiles = _Tiles(sequences[owner], position, rows, is_query, first_chunk, num_keys)
    return tiles.select(num_keys.argsort(descending=True, stable=True))


def _attend(q: torch.Tensor, out: torch.Tensor, tiles: _Tiles, keys: _Keys) -> None:
    """Fills the tiles' rows of `out`, a group of tiles at a time so that memory stays bounded."""
    _, num_kv_heads, _, head_dim = keys.k_cache.shape
    heads_per_kv = q.shape[1] // num_kv_heads
    num_rows = tiles.rows.shape[1] * heads_per_kv
    group = max(1, GROUP_ELEMENTS // (num_kv_heads * KEY_CHUNK * max(head_dim, num_rows)))
    for first in range(0, len(tiles.sequence), group):
        part = tiles.select(slice(first, first + group))
        queries = _tile_queries(q[part.rows], num_kv_heads).mul_(keys.variant.scale * _static(keys.k_scale))
        attended = _online_softmax(queries, part, keys, heads_per_kv).mul_(_static(keys.v_scale))
        by_query = attended[:, :, :num_rows].unflatten(2, (part.rows.shape[1], -1)).transpose(1, 2).flatten(2, 3)
        out[part.rows[part.is_query]] = by_query[part.is_query].to(out.dtype)


def _static(scale: torch.Tensor | None) -> torch.Tensor | float:
    """The factor [num_kv_heads or 1, 1, 1] of a static scale; 1 where there is none."""
    return 1.0 if scale is None or is_per_token(scale) else scale[:, None, None]


def _tile_queries(q: torch.Tensor, num_kv_heads: int) -> torch.Tensor:
    """[n, width, num_q_heads, head_dim] to float32 [n, num_kv_heads, rows, head_dim]. Rows go query by query and then
    by head; zeros fill them up to ROW_MULTIPLE."""
    n, width, num_q_heads, head_dim = q.shape
    num_rows = width * (num_q_heads // num_kv_heads)
    tiled = torch.zeros(n, num_kv_heads, -(-num_rows // ROW_MULTIPLE) * ROW_MULTIPLE, head_dim, device=q.device)
    by_head = q.unflatten(2, (num_kv_heads, -1)).transpose(1, 2)  # [n, num_kv_heads, width, heads_per_kv, head_dim]
    tiled[:, :, :num_rows] = by_head.flatten(2, 3)
    return tiled


def _online_softmax(queries: torch.Tensor, tiles: _Tiles, keys: _Keys, heads_per_kv: int) -> torch.Tensor:
    """Attention of each tile, one chunk of keys after the other. Source: Milakov and Gimelshein, arXiv 1805.02867.

    queries: float32 [n, num_kv_heads, rows, head_dim], scaled. Returns their shape.
    """
    best = queries.new_full((*queries.shape[:3], 1), LOWEST)
    total = torch.zeros_like(best)
    weighted = torch.zeros_like(queries)
    most_keys = int(tiles.num_keys[0])
    for first_key in range(0, most_keys, KEY_CHUNK):
        some = slice(0, int((tiles.num_keys > first_key).sum()))  # those with the most keys come first
        length = min(KEY_CHUNK, -(-(most_keys - first_key) // KEY_STEP) * KEY_STEP)
        active = tiles.select(some)
        chunk = _locate_chunk(active, first_key, length, keys)
        scores = _scores(queries[some], chunk, keys)
        at = _row_positions(active, queries.shape[2], heads_per_kv)
        scores += _mask(chunk.positions, at, keys.variant.sliding_window)
        new_best = torch.maximum(best[some], scores.amax(-1, keepdim=True))
        weights = scores.sub_(new_best).exp_()
        decay = torch.exp(best[some] - new_best)
        total[some] = total[some] * decay + _sum_in_order(weights)
        if keys.v_scale is not None and is_per_token(keys.v_scale):
            weights *= _load(keys.v_scale.unsqueeze(-1), chunk).transpose(-1, -2)
        values = _product(weights, _load(keys.v_cache, chunk, is_per_token(keys.v_scale)))
        weighted[some] = weighted[some].mul_(decay).add_(values)
        best[some] = new_best
    if keys.variant.sinks is not None:
        _join_sinks(best, total, weighted, keys.variant.sinks, tiles.rows.shape[1])
    return weighted / total


def _scores(queries: torch.Tensor, chunk: _Chunk, keys: _Keys) -> torch.Tensor:
    """float32 [n, num_kv_heads, rows, length]."""
    stored = _load(keys.k_cache, chunk, is_per_token(keys.k_scale))
    if (offset := keys.variant.k_offset) is not None:
        assert keys.k_scale is not None
        whole = stored * _load(keys.k_scale.unsqueeze(-1), chunk)
        return _product(queries, (whole + _offsets(offset, chunk)).transpose(-1, -2))
    scores = _product(queries, stored.transpose(-1, -2))
    if keys.k_scale is not None and is_per_token(keys.k_scale):
        scores *= _load(keys.k_scale.unsqueeze(-1), chunk).transpose(-1, -2)
    if (cap := keys.variant.soft_cap) is not None:
        scores.div_(cap).tanh_().mul_(cap)
    return scores


def _offsets(k_offset: torch.Tensor, chunk: _Chunk) -> torch.Tensor:
    """What the keys of a chunk lack, [n, num_kv_heads, length, head_dim]; beyond the table whatever."""
    segments = (chunk.positions // SEGMENT).clamp_max(len(k_offset) - 1)
    return k_offset[segments].transpose(1, 2)


def _join_sinks(
    best: torch.Tensor, total: torch.Tensor, weighted: torch.Tensor, sinks: torch.Tensor, width: int
) -> None:
    """Takes each head's sink into a finished softmax, in place: one more score, without a value."""
    by_row = sinks.view(best.shape[1], -1).repeat(1, width)  # as the rows of _tile_queries
    sink = torch.zeros_like(best[:1])
    sink[0, :, : by_row.shape[1], 0] = by_row
    highest = torch.maximum(best, sink)
    decay = torch.exp(best - highest)
    total.mul_(decay).add_(torch.exp(sink - highest))
    weighted.mul_(decay)


def _sum_in_order(weights: torch.Tensor) -> torch.Tensor:
    """Sum over the last dimension, kept, by steps and then step by step: zeros at the end do not change it."""
    return weights.unflatten(-1, (-1, KEY_STEP)).sum(-1).cumsum(-1)[..., -1:]


def _locate_chunk(tiles: _Tiles, first_key: int, length: int, keys: _Keys) -> _Chunk:
    """Where `length` keys of each tile lie, from its `first_key`th on. `length` is a multiple of KEY_STEP."""
    _, num_kv_heads, block_size, _ = keys.k_cache.shape
    device = tiles.position.device
    piece = math.gcd(block_size, KEY_STEP)
    positions = tiles.first_chunk[:, None] * KEY_CHUNK + torch.arange(first_key, first_key + length, device=device)
    context = keys.seq_lens[tiles.sequence][:, None]
    starts = torch.minimum(positions[:, ::piece], context - 1)  # beyond the end the last block is taken again
    block = keys.block_table[tiles.sequence[:, None], starts // block_size].to(torch.int64)
    heads = torch.arange(num_kv_heads, device=device)
    places = (block[:, None, :], heads[:, None], (starts % block_size // piece)[:, None, :])
    unwritten = (positions >= context).nonzero(as_tuple=True)
    return _Chunk(positions, places, piece, unwritten)


def _load(cache: torch.Tensor, chunk: _Chunk, marks_nan: bool = False) -> torch.Tensor:
    """A chunk of the cache as float32 [n, num_kv_heads, length, head_dim], before a scale is applied. marks_nan: scales
    are NaN wherever codes are.

    Places that nobody wrote are zeroed: the mask gives their keys the weight 0, and 0 times a stale NaN is NaN.
    """
    is_encoded = cache.dtype in STORAGE_MAX
    stored = cache.view(torch.int8) if is_encoded else cache
    vectors = stored.unflatten(2, (-1, chunk.piece))[chunk.places].flatten(2, 3)
    sequence, place = chunk.unwritten
    vectors[sequence, :, place] = 0
    if not is_encoded:
        return vectors.to(torch.float32)
    codes = vectors.view(cache.dtype)
    return decode_finite(codes) if marks_nan else decode_exactly(codes)


def _product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Batched matrix product of [n, heads, a, b] and [n, heads, b, c]."""
    return torch.bmm(left.flatten(0, 1), right.flatten(0, 1)).unflatten(0, left.shape[:2])


def _row_positions(tiles: _Tiles, num_rows: int, heads_per_kv: int) -> torch.Tensor:
    """int64 [n, num_rows or 1]: of each row's query in its sequence. Rows that fill a tile up stand after the last."""
    if tiles.rows.shape[1] == 1:
        return tiles.position[:, None]
    return tiles.position[:, None] + torch.arange(num_rows, device=tiles.position.device) // heads_per_kv


def _mask(positions: torch.Tensor, at: torch.Tensor, sliding_window: int | None) -> torch.Tensor:
    """float32 [n, 1, num_rows or 1, length]: 0 where a row's query, at `at`, sees the key, else -inf."""
    distance = at[:, :, None] - positions[:, None, :]
    hidden = distance < 0
    if sliding_window is not None:
        hidden |= distance >= sliding_window
    return torch.zeros(hidden.shape, device=hidden.device).masked_fill_(hidden, -torch.inf).unsqueeze(1)
