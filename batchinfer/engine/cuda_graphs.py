"""Decode steps as captured graphs: steps in which each sequence computes one token run on static buffers, filled up to
one of a few sizes. Used by the model runner. Knows no CUDA: what captures is handed in.

A graph freezes its launches, so there is one for each number of rows, and for each width of the block table, on which
some kernels' work depends. Rows that fill a size up are neither written nor read: their slot in the cache is -1 and
their length 0."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from batchinfer.engine.device_queue import Array
from batchinfer.engine.input_builder import ForwardBatch, fill_in_tokens
from batchinfer.engine.model import Model
from batchinfer.engine.persistent_batch import StepInputs


@dataclass(frozen=True, slots=True)
class CapturedRun:
    """replay() repeats the launches of the run that was captured; output is then what that run returned, anew."""

    replay: Callable[[], object]
    output: Tensor


Capture = Callable[[Callable[[], Tensor]], CapturedRun]


@dataclass(frozen=True, slots=True)
class GraphPlan:
    """sizes, widths: rows of the graphs and blocks of their tables, both rising."""

    capture: Capture
    sizes: tuple[int, ...]
    widths: tuple[int, ...]

    @property
    def count(self) -> int:
        return len(self.sizes) * len(self.widths)


def graph_sizes(max_num_seqs: int) -> tuple[int, ...]:
    """Of a graph's rows less than a half fill it up, and from 65 sequences on less than a fifth."""
    sizes = (1, 2, 4, 8, *range(16, 128, 16), *range(128, 256, 32), *range(256, max_num_seqs, 64))
    return (*(size for size in sizes if size < max_num_seqs), max_num_seqs)


def graph_widths(max_blocks: int, block_size: int, cost_grows: bool) -> tuple[int, ...]:
    """A wider table launches more programs of decode attention, one for each segment that a sequence may have: 4 up to
    2,048 tokens, 16 up to 8,192 and 32 beyond. One whose segment is not there reads two lengths and leaves, after a
    microsecond or so, and a multiprocessor runs two at once: of 512 sequences with 1,500 tokens on 8 KV heads in a
    table for 131,072, 119,000 of 131,000 programs a layer, which take 132 multiprocessors about 0.4 ms (predicted, not
    measured), as long as reading the keys does. cost_grows: beyond that the table's width costs time by itself."""
    bounds = (2048, 8192, 32768, 131072) if cost_grows else (2048, 8192)
    widths = [max(1, tokens // block_size) for tokens in bounds]
    return (*(width for width in widths if width < max_blocks), max_blocks)


class DecodeGraphs:
    """The graphs of one model over one cache, captured when this is made; nothing is allocated later."""

    def __init__(self, plan: GraphPlan, model: Model, cache: Any, last_tokens: Tensor, stack_width: int = 0) -> None:
        """last_tokens: int64 [num_slots], read for tokens that the host does not know yet. stack_width: of KeyStacks;
        0: the device needs none."""
        self._plan = plan
        self._model = model
        self._cache = cache
        self._last_tokens = last_tokens
        rows, device = plan.sizes[-1], model.device
        self._longs = torch.zeros(4, rows, dtype=torch.int64, device=device)  # as _longs makes them
        self._longs[3] = -1
        self._ints = torch.zeros(2, rows, dtype=torch.int32, device=device)  # seq_lens, prompt_lens
        self._table = torch.zeros(rows, plan.widths[-1], dtype=torch.int32, device=device)
        self._stacks = torch.zeros(rows, stack_width, dtype=torch.int32, device=device) if stack_width else None
        self._offsets = torch.arange(rows + 1, dtype=torch.int32, device=device)
        self._graphs = {
            (size, width): plan.capture(partial(self._forward, size, width))
            for size in reversed(plan.sizes)  # the largest first: the others fit into its memory
            for width in reversed(plan.widths)
        }

    def _forward(self, size: int, width: int) -> Tensor:
        token_ids, slots, positions, slot_mapping = self._longs[:, :size]
        seq_lens, prompt_lens = self._ints[:, :size]
        batch = ForwardBatch(
            token_ids=fill_in_tokens(token_ids, slots, self._last_tokens),
            positions=positions,
            slot_mapping=slot_mapping,
            block_table=self._table[:size, :width],
            cu_seqlens_q=self._offsets[: size + 1],
            seq_lens=seq_lens,
            prompt_lens=prompt_lens,
            stacks=None if self._stacks is None else self._stacks[:size],
        )
        return self._model.forward(batch, self._cache, prompt_lens)

    def prepare(
        self,
        inputs: StepInputs,
        prompt_lens: npt.NDArray[np.int32],
        upload: Callable[[Array], Tensor],
        stacks: npt.NDArray[np.int32] | None = None,
    ) -> Callable[[], Tensor] | None:
        """Work that computes the step's hidden states [num_seqs, hidden_size], valid until the next step's; None where
        a sequence computes several tokens, or no graph is large enough."""
        num_seqs, num_blocks = inputs.block_table.shape
        size = next((size for size in self._plan.sizes if size >= num_seqs), None)
        width = next((width for width in self._plan.widths if width >= num_blocks), None)
        if size is None or width is None or len(inputs.token_ids) != num_seqs:
            return None
        graph = self._graphs[size, width]
        longs, ints = upload(_longs(inputs, size)), upload(_ints(inputs, prompt_lens, size))
        table, own_stacks = upload(inputs.block_table), None if stacks is None else upload(stacks)

        def run() -> Tensor:
            self._longs[:, :size].copy_(longs)
            self._ints[:, :size].copy_(ints)
            self._table[:num_seqs, :num_blocks].copy_(table)  # what stands beyond is not read
            if self._stacks is not None and own_stacks is not None:
                self._stacks[:num_seqs].copy_(own_stacks)  # rows that fill up have no keys, and leave before
            graph.replay()
            return graph.output[:num_seqs]

        return run


def _longs(inputs: StepInputs, size: int) -> npt.NDArray[np.int64]:
    """[4, size]: token_ids, slots of the tokens that are not known, positions, slot_mapping."""
    num_seqs = len(inputs.seq_lens)
    longs = np.zeros((4, size), np.int64)
    longs[3, num_seqs:] = -1
    longs[0, :num_seqs] = inputs.token_ids
    if inputs.late_slots is not None:
        longs[1, :num_seqs] = inputs.late_slots
    longs[2, :num_seqs] = inputs.positions
    longs[3, :num_seqs] = inputs.slot_mapping
    return longs


def _ints(inputs: StepInputs, prompt_lens: npt.NDArray[np.int32], size: int) -> npt.NDArray[np.int32]:
    """[2, size]: seq_lens, prompt_lens."""
    num_seqs = len(inputs.seq_lens)
    ints = np.zeros((2, size), np.int32)
    ints[0, :num_seqs] = inputs.seq_lens
    ints[1, :num_seqs] = prompt_lens
    return ints
