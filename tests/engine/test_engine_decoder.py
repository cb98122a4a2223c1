"""The engine over a tiny random Llama in float32: greedy tokens equal Hugging Face's, whatever is batched, cut, cached
or preempted, and beside rows whose numbers break."""

import numpy as np
import pytest
import torch
from stand_in import PieceTokenizer, make_request, run
from transformers import LlamaConfig, LlamaForCausalLM

from batchinfer.cache.block_pool import BlockPool
from batchinfer.cache.paged_kv import PagedKVCache
from batchinfer.config import SchedulerConfig
from batchinfer.engine.engine import Engine
from batchinfer.errors import ErrorCode
from batchinfer.models.families.registry import parse_config
from batchinfer.models.weights import build_decoder

VOCAB = 61
NEW_TOKENS = 14
SETTINGS = {
    "together": {},
    "alone": {"max_num_seqs": 1},
    "chunks": {"max_num_batched_tokens": 5, "block_size": 8},
    "no-prefix-cache": {"enable_prefix_caching": False, "block_size": 16},
    "preempting": {"num_blocks": 14, "max_num_batched_tokens": 20},
}


class StateDict:
    where = "a random model"

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self.names = tensors.keys()
        self.read = tensors.__getitem__


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def oracle():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=48,
        intermediate_size=80,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        initializer_range=0.5,
        tie_word_embeddings=False,
        dtype="float32",
    )
    return LlamaForCausalLM(config).eval()


def make_decoder(oracle, poisoned_token: int | None = None):
    tensors = {name: tensor.clone() for name, tensor in oracle.state_dict().items()}
    if poisoned_token is not None:
        tensors["model.embed_tokens.weight"][poisoned_token] = torch.nan
    spec = parse_config(oracle.config.to_dict(), "config.json", ())
    return build_decoder(spec, StateDict(tensors), torch.float32, torch.device("cpu"))


def make_engine(
    decoder, num_blocks=100, block_size=4, enable_prefix_caching=True, max_num_seqs=8, max_num_batched_tokens=64
):
    cache = PagedKVCache(decoder.kv_cache_spec(block_size), num_blocks)
    for layer in range(decoder.spec.num_layers):  # what memory may hold before it is written
        cache.key(layer).fill_(torch.nan)
        cache.value(layer).fill_(torch.nan)
    pool = BlockPool(num_blocks, block_size, enable_prefix_caching)
    config = SchedulerConfig(  # greedy: a forecast would spare the preemptions
        max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens, admission="greedy"
    )
    threshold = decoder.spec.rope.length_threshold
    engine = Engine(decoder, cache, pool, PieceTokenizer(), config, frozenset(), 50, rope_length_threshold=threshold)
    return engine, pool


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    """Eight lengths from 1 to 36, three of them with a common beginning."""
    rng = np.random.default_rng(0)
    common = rng.integers(0, VOCAB, 12).tolist()
    return [rng.integers(0, VOCAB, n).tolist() for n in (1, 3, 9, 20, 36)] + [[*common, i] for i in (1, 2, 3)]


@pytest.fixture(scope="module")
def expected(oracle, prompts) -> list[list[int]]:
    completions = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        with torch.inference_mode():
            output = oracle.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                max_new_tokens=NEW_TOKENS,
                min_new_tokens=NEW_TOKENS,
                eos_token_id=None,
                pad_token_id=0,
            )
        completions.append(output[0, len(prompt) :].tolist())
    return completions


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("order", [1, -1], ids=["forward", "backward"])
def test_greedy_tokens_equal_hugging_face(oracle, prompts, expected, name, order):
    engine, pool = make_engine(make_decoder(oracle), **SETTINGS[name])
    requests = [make_request(i, prompt, NEW_TOKENS) for i, prompt in enumerate(prompts)]
    results = run(engine, requests[::order])
    assert [results[request.id].token_ids for request in requests] == expected
    assert (sum(r.num_preemptions for r in results.values()) > 0) == (name == "preempting")
    assert pool.num_free_blocks == pool.num_blocks


def test_scores_are_the_same_bits_whatever_the_chunks(oracle, prompts):
    requests = [make_request(i, p, 4, prompt_logprobs=True, logprobs=2, temperature=0.8) for i, p in enumerate(prompts)]
    whole, *others = (run(make_engine(make_decoder(oracle), **s)[0], requests) for s in SETTINGS.values())
    for results in others:
        for request in requests:
            a, b = whole[request.id], results[request.id]
            assert (a.token_ids, a.logprobs) == (b.token_ids, b.logprobs)
            assert a.prompt_logprobs.per_token.tobytes() == b.prompt_logprobs.per_token.tobytes()
    for i, prompt in enumerate(prompts):
        with torch.inference_mode():
            logprobs = oracle(torch.tensor([prompt])).logits[0].log_softmax(-1)
        by_hand = logprobs[torch.arange(len(prompt) - 1), torch.tensor(prompt[1:], dtype=torch.int64)]
        np.testing.assert_allclose(whole[requests[i].id].prompt_logprobs.per_token, by_hand, atol=1e-4)


@pytest.mark.parametrize("max_num_batched_tokens", [64, 5])
def test_rows_beside_a_broken_one_are_unchanged(oracle, prompts, expected, max_num_batched_tokens):
    """The broken rows come between healthy ones, share a beginning with them, and leave NaN in blocks used again."""
    poison = min(set(range(VOCAB)) - {token for tokens in prompts + expected for token in tokens})
    engine, _ = make_engine(make_decoder(oracle, poison), num_blocks=24, max_num_batched_tokens=max_num_batched_tokens)
    healthy = [make_request(i, prompt, NEW_TOKENS) for i, prompt in enumerate(prompts)]
    broken = [make_request(20 + i, [*prompts[5][:12], 7, 8, poison, 9, i], NEW_TOKENS) for i in range(3)]
    results = run(engine, [broken[0], *healthy[:4], broken[1], *healthy[4:], broken[2]])
    for request in broken:
        assert (results[request.id].finish_reason, results[request.id].error_code) == ("error", ErrorCode.NUMERICAL)
    assert [results[request.id].token_ids for request in healthy] == expected


def test_prompts_whose_rope_depends_on_their_length_share_only_equal_kv(oracle):
    config = LlamaConfig(
        **{
            **oracle.config.to_dict(),
            "max_position_embeddings": 16,
            "rope_parameters": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0},
        }
    )
    decoder = make_decoder(LlamaForCausalLM(config).eval())
    common = np.random.default_rng(5).integers(0, VOCAB, 20).tolist()
    endings = ([0], list(range(9)), [0])  # the first and the last are equally long
    requests = [make_request(i, common + ending, 6) for i, ending in enumerate(endings)]
    together = run(make_engine(decoder, max_num_seqs=1)[0], requests)
    for request in requests:
        alone = run(make_engine(decoder, enable_prefix_caching=False)[0], [request])
        assert together[request.id].token_ids == alone[request.id].token_ids
    cached = [together[request.id].cached_prompt_tokens for request in requests]
    assert cached == [0, 0, 20]
