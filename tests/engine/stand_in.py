"""A model without weights whose next token depends on its whole context as read back from the paged cache, a naive
generator for the same rule, and a tokenizer of chosen pieces."""

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from batchinfer.cache.block_pool import BlockPool
from batchinfer.config import SchedulerConfig
from batchinfer.data.detokenizer import IncrementalDetokenizer, TokenBytes
from batchinfer.engine.engine import Engine
from batchinfer.engine.input_builder import ForwardBatch, WantedTokens
from batchinfer.request import Request, RequestId, Result, SamplingParams, make_noise_key

VOCAB = 61
PRIMES = np.array([1009, 2003, 3001, 4001, 5003])
_MIX = np.random.default_rng(1).normal(size=(len(PRIMES), VOCAB)) * 4
_WEIGHTS = np.random.default_rng(2).integers(1, 1 << 20, size=4096)


def context_features(tokens: np.ndarray) -> np.ndarray:
    """float [num_tokens, features]: each row depends on all tokens up to it and on their order."""
    sums = np.cumsum((tokens + 1) * _WEIGHTS[: len(tokens)])
    return (sums[:, None] % PRIMES) / PRIMES


def logits_of(features: np.ndarray) -> np.ndarray:
    return np.sin((features[:, :, None] * _MIX).sum(axis=1)) * 6


class StandInModel:
    """Stores token ids as its keys and values."""

    vocab_size = VOCAB
    device = torch.device("cpu")

    def __init__(self, block_size: int, poisoned_token: int | None = None) -> None:
        self.block_size = block_size
        self.poisoned_token = poisoned_token  # a context that holds it gives NaN from there on

    def forward(self, batch: ForwardBatch, cache: torch.Tensor, prompt_lens: torch.Tensor) -> torch.Tensor:
        assert int(batch.token_ids.min()) >= 0, "a token that nobody filled in"
        is_stored = batch.slot_mapping >= 0
        cache[batch.slot_mapping[is_stored]] = batch.token_ids[is_stored]
        offsets = batch.cu_seqlens_q.tolist()
        rows = []
        for i, seq_len in enumerate(batch.seq_lens.tolist()):
            if seq_len == 0:  # fills up a captured step
                rows.append(np.full((offsets[i + 1] - offsets[i], len(PRIMES)), np.nan))
                continue
            slots = batch.block_table[i].long()[:, None] * self.block_size + torch.arange(self.block_size)
            context = cache[slots.flatten()[:seq_len]].numpy()
            features = context_features(context)
            if self.poisoned_token is not None:
                features[np.logical_or.accumulate(context == self.poisoned_token)] = np.nan
            rows.append(features[seq_len - (offsets[i + 1] - offsets[i]) :])
        states = torch.from_numpy(np.concatenate(rows))
        if batch.wanted is not None:
            _spoil_others(states, batch.wanted)
        return states

    def compute_logits(self, hidden: torch.Tensor, scratch: torch.Tensor | None = None) -> torch.Tensor:
        return torch.from_numpy(logits_of(hidden.numpy())).float()


def _spoil_others(states: torch.Tensor, wanted: WantedTokens) -> None:
    """Rows that are not wanted say nothing but whether they are finite."""
    others = torch.ones(len(states), dtype=torch.bool)
    others[wanted.tokens] = False
    states[others] = states[others] * 0 + 1e6


def naive_greedy(prompt: Sequence[int], num_tokens: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(num_tokens):
        tokens.append(int(logits_of(context_features(np.array(tokens))[-1:]).argmax()))
    return tokens[len(prompt) :]


class PieceTokenizer:
    """Token i stands for pieces[i], by default "<i>"; special ids leave no text."""

    def __init__(self, pieces: Mapping[int, bytes] | None = None, special: frozenset[int] = frozenset()) -> None:
        pieces = pieces or {}
        known = {str(i): pieces.get(i, f"<{i}>".encode()) for i in range(VOCAB)}
        self.token_bytes = TokenBytes(str, special, known.__getitem__)

    def detokenizer(self, prompt_token_ids: Sequence[int] = ()) -> IncrementalDetokenizer:
        return IncrementalDetokenizer(self.token_bytes, prompt_token_ids)

    def decode(self, token_ids: Sequence[int], prompt_token_ids: Sequence[int] = ()) -> str:
        return self.detokenizer(prompt_token_ids).decode(token_ids)


def make_request(row: int, prompt: Sequence[int], max_tokens: int, sample: int = 0, **params) -> Request:
    params.setdefault("temperature", 0.0)
    request_id = RequestId(0, row, sample)
    sampling = SamplingParams(max_tokens=max_tokens, **params)
    key = make_noise_key(request_id, sampling.seed, 0)
    return Request(request_id, np.array(prompt, np.int32), sampling, max_tokens, key)


def make_engine(
    *,
    num_blocks: int = 400,
    block_size: int = 4,
    max_num_seqs: int = 8,
    max_num_batched_tokens: int = 64,
    admission: str = "forecast",
    enable_prefix_caching: bool = True,
    eos_token_ids: frozenset[int] = frozenset(),
    max_model_len: int = 120,
    max_steps_in_flight: int = 1,
    tokenizer: PieceTokenizer | None = None,
    model: object | None = None,
    poisoned_token: int | None = None,
    **options,
) -> tuple[Engine, BlockPool]:
    pool = BlockPool(num_blocks, block_size, enable_prefix_caching)
    engine = Engine(
        model or StandInModel(block_size, poisoned_token),
        torch.full((num_blocks * block_size,), -7),
        pool,
        tokenizer or PieceTokenizer(),
        SchedulerConfig(max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens, admission=admission),
        eos_token_ids,
        max_model_len,
        max_steps_in_flight,
        **options,
    )
    return engine, pool


def run(engine: Engine, requests: Sequence[Request]) -> dict[RequestId, Result]:
    for request in requests:
        engine.add(request)
    results: dict[RequestId, Result] = {}
    for _ in range(20_000):
        if not engine.has_unfinished:
            return results
        for result in engine.step():
            assert result.id not in results
            results[result.id] = result
    raise AssertionError("the engine makes no progress")
