"""Runs what steps launch outside captured graphs once before the first step, so that no kernel is compiled or loaded in
the step loop. Called by the engine, on devices whose kernels are compiled on first use."""

from collections.abc import Iterator
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor

from batchinfer.engine.input_builder import ForwardBatch
from batchinfer.engine.key_stacks import KeyStacks
from batchinfer.engine.model import Model
from batchinfer.kernels import sampling
from batchinfer.kernels.sampling import LogitChanges, RowTokens


@torch.inference_mode()
def warm_up(
    model: Model,
    cache: Any,
    max_num_batched_tokens: int,
    max_num_seqs: int,
    max_blocks: int,
    most_logits: int,
    key_stacks: KeyStacks | None = None,
) -> None:
    """Passes over one sequence and over sequences of one token, and tokens for their rows, of sizes that double up to
    the largest: kernels are chosen by such sizes. Nothing of the cache is read or written.

    max_blocks: of a sequence. most_logits: rows of logits that a step makes at once. key_stacks: as the steps have it.
    """
    idle = partial(_idle_pass, model, cache, key_stacks)
    for num_tokens in _sizes(max_num_batched_tokens):
        model.forward(*idle(num_tokens, num_seqs=1))
    model.forward(*idle(2, 1, max_blocks))  # long contexts take other kernels
    for num_seqs in _sizes(max_num_seqs):
        hidden = model.forward(*idle(num_seqs, num_seqs))
        _sample(model.compute_logits(hidden[: min(num_seqs, most_logits)].zero_()))


def _sizes(largest: int) -> Iterator[int]:
    size = 1
    while size < largest:
        yield size
        size *= 2
    yield largest


def _idle_pass(
    model: Model, cache: Any, key_stacks: KeyStacks | None, num_tokens: int, num_seqs: int, num_blocks: int = 1
) -> tuple[ForwardBatch, Any, Tensor]:
    """Arguments of Model.forward: equally long sequences of tokens without a place in the cache. num_blocks: width of
    the table."""

    def zeros(*shape: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros(*shape, dtype=dtype, device=model.device)

    offsets = torch.arange(num_seqs + 1, dtype=torch.int32, device=model.device) * (num_tokens // num_seqs)
    batch = ForwardBatch(
        token_ids=zeros(num_tokens, dtype=torch.int64),
        positions=zeros(num_tokens, dtype=torch.int64),
        slot_mapping=zeros(num_tokens, dtype=torch.int64) - 1,
        block_table=zeros(num_seqs, num_blocks, dtype=torch.int32),
        cu_seqlens_q=offsets,
        seq_lens=zeros(num_seqs, dtype=torch.int32),
        prompt_lens=zeros(num_seqs, dtype=torch.int32),
        stacks=zeros(num_seqs, key_stacks.width, dtype=torch.int32) if key_stacks else None,
    )
    return batch, cache, batch.prompt_lens


def _sample(logits: Tensor) -> None:
    """By every rule: greedily, drawn with and without filters, and with each set of changes."""
    rows, device = len(logits), logits.device
    ones, keys = torch.ones(rows, device=device), torch.zeros(rows, dtype=torch.int64, device=device)
    one = RowTokens(torch.arange(rows + 1, device=device), keys)
    bias, penalties = sampling.Bias(one, ones), sampling.Penalties(one, ones, ones, ones, ones)
    token_ids, _ = sampling.greedy(logits)
    for kinds in product((None, bias), (None, penalties), (None, one)):
        changes = LogitChanges(*kinds) if any(kinds) else None
        sampling.sample(logits, ones, ones / 2, keys + 1, ones / 2, keys, keys, changes)
        sampling.sample(logits, ones, ones * 0, keys, ones, keys, keys, changes)
    sampling.token_logprobs(logits[:1].float(), token_ids[:1], 1)
