"""The step loop on a device: two steps in flight and captured decode steps against plain steps; skipped without one."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from batchinfer.cache.block_pool import BlockPool
from batchinfer.cache.paged_kv import PagedKVCache
from batchinfer.config import SchedulerConfig
from batchinfer.engine.engine import Engine
from batchinfer.executors.gpu_steps import STEPS_IN_FLIGHT, gpu_steps
from batchinfer.models.families.registry import parse_config
from batchinfer.models.weights import build_decoder
from batchinfer.request import Request, RequestId, Result, SamplingParams, make_noise_key

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
VOCAB, BLOCK_SIZE, MAX_MODEL_LEN = 61, 16, 256
VARIANTS = (
    {"temperature": 0.0},
    {"temperature": 0.8, "top_p": 0.9, "logprobs": 2},
    {"temperature": 0.0, "frequency_penalty": 0.6, "stop": ("7>",)},
    {"temperature": 1.0, "logit_bias": ((5, 2.0),), "min_tokens": 5, "prompt_logprobs": True},
)


class StateDict:
    where = "a random model"

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self.names = tensors.keys()
        self.read = tensors.__getitem__


class Pieces:
    """Token i stands for "<i>"."""

    def detokenizer(self, prompt_token_ids=()):
        return self

    def add(self, token_id: int) -> str:
        return f"<{token_id}>"

    def finish(self) -> str:
        return ""

    def decode(self, token_ids, prompt_token_ids=()) -> str:
        return "".join(map(self.add, token_ids))


@pytest.fixture(scope="module")
def decoder():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=MAX_MODEL_LEN,
        initializer_range=0.3,
        tie_word_embeddings=False,
        dtype="float32",
    )
    tensors = {name: tensor.cuda() for name, tensor in LlamaForCausalLM(config).state_dict().items()}
    spec = parse_config(config.to_dict(), "config.json", ())
    return build_decoder(spec, StateDict(tensors), torch.float32, torch.device("cuda"))


def run(decoder, num_blocks: int, steps_in_flight: int, eager: bool) -> dict[RequestId, Result]:
    spec = decoder.kv_cache_spec(BLOCK_SIZE)
    steps = gpu_steps(decoder, spec, max_num_seqs=24, max_model_len=MAX_MODEL_LEN, eager=eager)
    engine = Engine(
        decoder,
        PagedKVCache(spec, num_blocks, "cuda"),
        BlockPool(num_blocks, BLOCK_SIZE),
        Pieces(),
        SchedulerConfig(max_num_seqs=24, max_num_batched_tokens=128, admission="greedy"),
        frozenset(),
        MAX_MODEL_LEN,
        steps_in_flight,
        queue=steps.queue,
        graphs=steps.graphs,
        key_stacks=steps.key_stacks,
    )
    engine.warm_up()
    generator = torch.Generator().manual_seed(1)
    for row in range(40):
        prompt = torch.randint(0, VOCAB, (1 + 3 * row,), generator=generator).numpy().astype("int32")
        params = SamplingParams(max_tokens=60, **VARIANTS[row % len(VARIANTS)])
        request_id = RequestId(0, row, 0)
        engine.add(Request(request_id, prompt, params, 60, make_noise_key(request_id, params.seed, 0)))
    results: dict[RequestId, Result] = {}
    while engine.has_unfinished:
        results |= {result.id: result for result in engine.step()}
    return results


@pytest.mark.parametrize("num_blocks", [600, 60], ids=["ample", "preempting"])
@pytest.mark.parametrize("eager", [False, True], ids=["graphs", "eager"])
def test_answers_equal_those_of_plain_steps(decoder, num_blocks, eager):
    plain = run(decoder, 600, 1, eager=True)
    results = run(decoder, num_blocks, STEPS_IN_FLIGHT, eager)
    assert (sum(result.num_preemptions for result in results.values()) > 0) == (num_blocks < 600)
    for request_id, expected in plain.items():
        found = results[request_id]
        assert (found.token_ids, found.text, found.finish_reason) == (
            expected.token_ids,
            expected.text,
            expected.finish_reason,
        )
