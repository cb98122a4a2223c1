"""Triton backend of greedy and sample. Nothing here waits for the device: rows that want no changes, no filter or no
draw leave the kernels at once. A row's token depends on its own logits and parameters alone."""

# Kernels have types of their own.
# mypy: allow-untyped-defs

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from batchinfer.kernels.common import triton_targets
from batchinfer.kernels.common.triton_targets import FUSED
from batchinfer.kernels.sampling.changes import LogitChanges
from batchinfer.kernels.sampling.gpu_changes import Offsets, changed_logits, offsets_of
from batchinfer.kernels.sampling.gpu_filters import find_cuts
from batchinfer.kernels.sampling.gpu_noise import noise_of
from batchinfer.kernels.sampling.gpu_rows import find_tops, is_changed, load_logits, pick_highest
from torch import Tensor

_TILE = 256  # tokens of which the highest logit is kept
_TILES = 16  # that a program reads at once; a row has room for whole ones, which lets rows be read in vectors
_BLOCK = _TILES * _TILE
_SEARCHED = 2048  # of them where cuts are searched, which takes more registers
_MOST = 4096  # candidates for a cut that registers hold


@triton.jit(do_not_specialize_on_alignment=["offsets", "parameters", "draws"])
def _draw(
    logits,  # as load_logits's
    stride,
    offsets,  # of the changes
    tops_ptr,  # float32 [n, num_tiles]
    known,  # (highest, cuts) float32 [n]
    parameters,  # (temperature float32 [n],)
    draws,  # (noise keys, positions) int64 [n]
    best_ptr,  # float32 [n, num_blocks]: the highest sum of scaled logit and noise of each BLOCK tokens
    place_ptr,  # int32 [n, num_blocks]: its first token
    vocab_size,
    num_tiles,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    temperature, highest = tl.load(parameters[0] + row), tl.load(known[0] + row)
    if (temperature <= 0) | (highest != highest):
        return
    # Noise is between -2.9 and 22.9: what is further below the likeliest token never wins.
    least = tl.maximum(tl.load(known[1] + row), -25.8)
    block, at = tl.program_id(1), row * tl.num_programs(1) + tl.program_id(1)
    tile = block * (BLOCK // TILE) + tl.arange(0, BLOCK // TILE)
    top = tl.max(tl.load(tops_ptr + row * num_tiles + tile, tile < num_tiles, float("-inf")), axis=0)
    if tl.div_rn(top - highest, temperature) < least:
        tl.store(best_ptr + at, float("-inf"))
        return
    token = block * BLOCK + tl.arange(0, BLOCK)
    values = load_logits(logits, stride, row, is_changed(row, offsets), token, vocab_size)
    scaled = tl.div_rn(values - highest, temperature)
    noise = noise_of(tl.load(draws[0] + row), tl.load(draws[1] + row), block * (BLOCK // 4), BLOCK // 4)
    total = tl.where((scaled >= least) & (token < vocab_size), scaled + noise, float("-inf"))
    best = tl.max(total, axis=0)
    tl.store(best_ptr + at, best)
    tl.store(place_ptr + at, tl.min(tl.where(total == best, token, vocab_size - 1), axis=0))


@triton.jit(do_not_specialize_on_alignment=["parameters"])
def _join_draws(
    best_ptr,  # as _draw's, like the next
    place_ptr,
    highest_ptr,
    parameters,
    token_ids_ptr,  # int64 [n]
    num_blocks,
    BLOCKS_BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    highest = tl.load(highest_ptr + row)
    if (tl.load(parameters[0] + row) <= 0) | (highest != highest):
        return
    block = tl.arange(0, BLOCKS_BLOCK)
    best = tl.load(best_ptr + row * num_blocks + block, block < num_blocks, float("-inf"))
    first = tl.min(tl.where(best == tl.max(best, axis=0), block, num_blocks - 1), axis=0)
    tl.store(token_ids_ptr + row, tl.load(place_ptr + row * num_blocks + first).to(tl.int64))


@dataclass(frozen=True, slots=True)
class _Known:
    """What is known of n rows. tops: float32 [n, num_tiles]; highest: float32 [n], NaN where a row is not finite."""

    tops: Tensor
    highest: Tensor
    token_ids: Tensor
    is_finite: Tensor

    @classmethod
    def empty(cls, logits: Tensor) -> "_Known":
        (num_rows, vocab_size), device = logits.shape, logits.device
        return cls(
            torch.empty((num_rows, triton.cdiv(vocab_size, _TILE * _TILES) * _TILES), device=device),
            torch.empty(num_rows, device=device),
            torch.empty(num_rows, dtype=torch.int64, device=device),
            torch.empty(num_rows, dtype=torch.bool, device=device),
        )

    def learn(self, logits: Tensor, offsets: Offsets | None) -> None:
        """offsets: of changes that these logits have; other rows stay as they are known."""
        num_rows, num_tiles = self.tops.shape
        sizes = (logits.shape[1], num_tiles)
        of_rows = (logits, logits.stride(0), offsets, self.tops, *sizes)
        find_tops[(num_rows, num_tiles // _TILES)](*of_rows, TILE=_TILE, BLOCK_TILES=_TILES, num_warps=8, **FUSED)
        pick_highest[(num_rows,)](
            *(*of_rows, self.token_ids, self.is_finite, self.highest),
            **{"TILE": _TILE, "TILES_BLOCK": triton.next_power_of_2(num_tiles)},
            num_warps=_TILE // 4 // triton_targets.current().warp_size,  # 16 bytes a lane
            **FUSED,
        )


def greedy(logits: Tensor) -> tuple[Tensor, Tensor]:
    """See the package's `greedy`."""
    logits = _dense_rows(logits)
    known = _Known.empty(logits)
    if len(logits):
        known.learn(logits, None)
    return known.token_ids, known.is_finite


def sample(
    logits: Tensor,
    temperature: Tensor,
    min_p: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    noise_keys: Tensor,
    positions: Tensor,
    changes: LogitChanges | None,
) -> tuple[Tensor, Tensor]:
    """See the package's `sample`."""
    logits = _dense_rows(logits)
    known = _Known.empty(logits)
    if not len(logits):
        return known.token_ids, known.is_finite
    known.learn(logits, None)
    changed: Tensor | None = None
    offsets: Offsets = (None, None, None)
    if changes is not None:
        changed, offsets = changed_logits(logits, changes), offsets_of(changes)
        known.learn(changed, offsets)
    columns = [values.contiguous() for values in (temperature, min_p, top_k, top_p, noise_keys, positions)]
    _choose(known, (logits, changed), offsets, tuple(columns[:4]), tuple(columns[4:]))
    return known.token_ids, known.is_finite


def _choose(
    known: _Known,
    logits: tuple[Tensor, Tensor | None],
    offsets: Offsets,
    parameters: tuple[Tensor, ...],
    draws: tuple[Tensor, ...],
) -> None:
    """Draws the tokens of the rows that want it. logits, offsets, parameters, draws: as _draw's."""
    num_rows, vocab_size = logits[0].shape
    device, num_tiles, blocks = logits[0].device, known.tops.shape[1], triton.cdiv(vocab_size, _BLOCK)
    source = (logits, logits[0].stride(0), offsets, known.tops)
    cuts = torch.empty(num_rows, device=device)
    room = torch.empty((num_rows, _MOST), device=device)
    sizes = (vocab_size, num_tiles)
    find_cuts[(num_rows,)](
        *(*source, known.highest, parameters, room, cuts, *sizes),
        **{"TILE": _TILE, "TILES_BLOCK": triton.next_power_of_2(num_tiles), "BLOCK": _SEARCHED, "MOST": _MOST},
        num_warps=_SEARCHED // 4 // triton_targets.current().warp_size,  # 16 bytes a lane
        **triton_targets.registers(128),
        **FUSED,
    )
    best = torch.empty((num_rows, blocks), device=device)
    place = torch.empty((num_rows, blocks), dtype=torch.int32, device=device)
    _draw[(num_rows, blocks)](
        *(*source, (known.highest, cuts), parameters[:1], draws, best, place, *sizes),
        **{"TILE": _TILE, "BLOCK": _BLOCK, "num_warps": 8},
        **FUSED,
    )
    _join_draws[(num_rows,)](
        *(best, place, known.highest, parameters[:1], known.token_ids, blocks),
        **{"BLOCKS_BLOCK": triton.next_power_of_2(blocks), "num_warps": 1},
        **FUSED,
    )


def _dense_rows(logits: Tensor) -> Tensor:
    return logits if logits.stride(1) == 1 else logits.contiguous()
