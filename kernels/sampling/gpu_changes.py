"""Changes to logits in Triton: rows that have any are copied as float32, then their tokens are biased, penalised and
barred, an entry a lane, so that long lists of one row are shared out. Called by gpu.py."""

# Kernels have types of their own.
# mypy: allow-untyped-defs

import torch
import triton
import triton.language as tl
from batchinfer.kernels.common.triton_targets import FUSED
from batchinfer.kernels.sampling.changes import LogitChanges, RowTokens
from batchinfer.kernels.sampling.gpu_rows import is_changed

Offsets = tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]
_LARGEST: tl.constexpr = tl.constexpr(1e30)
_COPIED = 4096  # logits that a program copies
_ENTRIES = 128  # that a program applies


@triton.jit(do_not_specialize_on_alignment=["offsets"])
def _copy_changed(
    logits_ptr,  # [n, vocab_size], rows `stride` apart
    stride,
    offsets,
    out_ptr,  # float32 [n, vocab_size]
    vocab_size,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    if is_changed(row, offsets) == 0:
        return
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_token = token < vocab_size
    logits = tl.load(logits_ptr + row * stride + token, is_token).to(tl.float32)
    tl.store(out_ptr + row * vocab_size + token, logits, is_token)


@triton.jit
def _bounded(x):
    """NaN stays NaN."""
    return tl.where(x > _LARGEST, _LARGEST, tl.where(x < -_LARGEST, -_LARGEST, x))


@triton.jit
def _row_of(entry, offsets_ptr, num_rows, halvings):
    """The row r of each entry, int64: offsets[r] <= entry < offsets[r + 1]."""
    low = tl.zeros_like(entry)
    high = low + num_rows
    for _ in range(halvings):
        middle = (low + high) // 2
        is_below = tl.load(offsets_ptr + middle) <= entry
        low = tl.where(is_below, middle, low)
        high = tl.where(is_below, high, middle)
    return low


@triton.jit(
    do_not_specialize=["num_entries", "num_rows", "halvings"],
    do_not_specialize_on_alignment=["tokens", "values", "factors"],
)
def _change(
    logits_ptr,  # float32 [n, vocab_size]
    tokens,  # (offsets int64 [n + 1], token ids int64 [num_entries])
    values,  # (float32 [num_entries] of bias,), or of output counts for penalties, or empty for barred tokens
    factors,  # (repetition, presence, frequency) float32 [n] for penalties, else empty
    num_entries,
    num_rows,
    halvings,  # that find one of num_rows rows
    vocab_size,
    KIND: tl.constexpr,  # bias, penalties or barred
    BLOCK: tl.constexpr,
):
    entry = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    is_entry = entry < num_entries
    row = _row_of(tl.minimum(entry, num_entries - 1), tokens[0], num_rows, halvings)
    place = logits_ptr + row * vocab_size + tl.load(tokens[1] + entry, is_entry, 0)
    if KIND == "barred":
        tl.store(place, tl.full(entry.shape, float("-inf"), tl.float32), is_entry)
    else:
        logit, value = tl.load(place, is_entry, 0.0), tl.load(values[0] + entry, is_entry, 0.0)
        if KIND == "bias":
            changed = logit + value
        else:
            repetition = tl.load(factors[0] + row, is_entry, 1.0)
            repetition = tl.minimum(tl.maximum(repetition, 1 / _LARGEST), _LARGEST)
            changed = tl.where(logit > 0, tl.div_rn(logit, repetition), logit * repetition)
            presence = tl.where(value > 0, tl.load(factors[1] + row, is_entry, 0.0), 0.0)
            changed -= tl.load(factors[2] + row, is_entry, 0.0) * value + presence
        tl.store(place, _bounded(changed), is_entry)


def offsets_of(changes: LogitChanges) -> Offsets:
    """Where the entries of each row lie: of bias, penalties and barred tokens."""
    bias, penalties, barred = changes.bias, changes.penalties, changes.barred
    return (
        None if bias is None else bias.tokens.offsets,
        None if penalties is None else penalties.tokens.offsets,
        None if barred is None else barred.offsets,
    )


def changed_logits(logits: torch.Tensor, changes: LogitChanges) -> torch.Tensor:
    """float32 [n, vocab], of rows with changes; other rows are not filled in."""
    num_rows, vocab_size = logits.shape
    out = torch.empty((num_rows, vocab_size), device=logits.device)
    grid = (num_rows, triton.cdiv(vocab_size, _COPIED))
    _copy_changed[grid](
        *(logits, logits.stride(0), offsets_of(changes), out, vocab_size), BLOCK=_COPIED, num_warps=8, **FUSED
    )
    if bias := changes.bias:
        _apply(out, "bias", bias.tokens, (bias.values,))
    if penalties := changes.penalties:
        factors = (penalties.repetition, penalties.presence, penalties.frequency)
        _apply(out, "penalties", penalties.tokens, (penalties.output_counts,), factors)
    if changes.barred is not None:
        _apply(out, "barred", changes.barred)
    return out


def _apply(
    logits: torch.Tensor,
    kind: str,
    tokens: RowTokens,
    values: tuple[torch.Tensor, ...] = (),
    factors: tuple[torch.Tensor, ...] = (),
) -> None:
    num_rows, num_entries = len(logits), len(tokens.token_ids)
    if num_entries:
        _change[(triton.cdiv(num_entries, _ENTRIES),)](
            *(logits, (tokens.offsets, tokens.token_ids), values, factors),
            *(num_entries, num_rows, num_rows.bit_length(), logits.shape[1]),
            **{"KIND": kind, "BLOCK": _ENTRIES, "num_warps": 4},
            **FUSED,
        )
