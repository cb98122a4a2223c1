"""Captured decode steps over a tiny random Llama: rows that fill a size up are neither written nor read, and tokens are
those of steps launched kernel by kernel."""

import weakref
from dataclasses import replace

import numpy as np
import pytest
import torch
from fake_device import FakeCapture, LateLane
from stand_in import PieceTokenizer, make_request, run
from transformers import LlamaConfig, LlamaForCausalLM

from batchinfer.cache.block_pool import BlockPool
from batchinfer.cache.paged_kv import PagedKVCache
from batchinfer.config import JobConfig, SchedulerConfig
from batchinfer.engine.cuda_graphs import DecodeGraphs, GraphPlan
from batchinfer.engine.device_queue import ImmediateQueue
from batchinfer.engine.engine import Engine
from batchinfer.engine.model_runner import ModelRunner
from batchinfer.engine.persistent_batch import StepInputs
from batchinfer.engine.staged_queue import StagedQueue
from batchinfer.engine.warm_up import warm_up
from batchinfer.executors import gpu_steps, local
from batchinfer.executors.local import LoadedModel
from batchinfer.models.decoder import Decoder
from batchinfer.models.families.registry import parse_config
from batchinfer.models.key_offsets import KeyStatistics
from batchinfer.models.weights import build_decoder

VOCAB, BLOCK_SIZE, NUM_BLOCKS = 61, 4, 100


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


@pytest.fixture(scope="module", params=["default", "dynamic"])
def decoder(request):
    """With frequencies that depend on the prompt's length, too."""
    return make_decoder(request.param)


def make_decoder(rope_type: str) -> Decoder:
    torch.manual_seed(0)
    rope = {"rope_type": rope_type, "rope_theta": 10000.0} | ({"factor": 4.0} if rope_type != "default" else {})
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=48,
        intermediate_size=80,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=16 if rope_type == "dynamic" else 64,
        initializer_range=0.5,
        tie_word_embeddings=False,
        dtype="float32",
        rope_parameters=rope,
    )
    model = LlamaForCausalLM(config).eval()
    spec = parse_config(config.to_dict(), "config.json", ())
    return build_decoder(spec, StateDict(dict(model.state_dict())), torch.float32, torch.device("cpu"))


def make_cache(decoder, fill: float = torch.nan) -> PagedKVCache:
    cache = PagedKVCache(decoder.kv_cache_spec(BLOCK_SIZE), NUM_BLOCKS)
    for layer in range(decoder.spec.num_layers):
        cache.key(layer).fill_(fill)
        cache.value(layer).fill_(fill)
    return cache


def make_engine(decoder, num_blocks=NUM_BLOCKS, **options) -> Engine:
    config = SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=24, admission="greedy")
    pool = BlockPool(num_blocks, BLOCK_SIZE)
    threshold = decoder.spec.rope.length_threshold
    cache, ends = make_cache(decoder), frozenset({7})
    return Engine(decoder, cache, pool, PieceTokenizer(), config, ends, 50, rope_length_threshold=threshold, **options)


@pytest.mark.parametrize(("num_blocks", "steps", "eagerness"), [(NUM_BLOCKS, 2, 0.0), (14, 2, 1.0), (20, 3, 0.5)])
def test_answers_equal_the_plain_loops(decoder, num_blocks, steps, eagerness):
    rng = np.random.default_rng(0)
    common = rng.integers(0, VOCAB, 12).tolist()
    prompts = [rng.integers(0, VOCAB, n).tolist() for n in (1, 3, 9, 20, 34)] + [[*common, i] for i in (1, 2, 3)]
    variants = [{}, {"temperature": 0.9, "logprobs": 2}, {"frequency_penalty": 0.7, "prompt_logprobs": True}]
    requests = [make_request(i, p, 14, **variants[i % 3]) for i, p in enumerate(prompts)]
    plain = run(make_engine(decoder), requests)
    capture = FakeCapture()
    graphs = GraphPlan(capture, (1, 2, 4, 8), (5, 13))
    queue = StagedQueue(LateLane(num_blocks, eagerness))
    results = run(make_engine(decoder, num_blocks, max_steps_in_flight=steps, queue=queue, graphs=graphs), requests)
    assert capture.num_captured == 8
    assert capture.num_replayed > 10
    assert len(set(capture.sizes)) > 1
    assert (sum(r.num_preemptions for r in results.values()) > 0) == (num_blocks < NUM_BLOCKS)
    for request in requests:
        a, b = plain[request.id], results[request.id]
        assert (a.token_ids, a.logprobs, a.finish_reason, a.text) == (b.token_ids, b.logprobs, b.finish_reason, b.text)
        if request.params.prompt_logprobs:
            assert a.prompt_logprobs.per_token.tobytes() == b.prompt_logprobs.per_token.tobytes()


@pytest.mark.parametrize("enforce_eager", [False, True])
def test_the_engine_of_a_gpu_gives_the_cpus_answers(decoder, enforce_eager, monkeypatch):
    """As executors/ builds it, warm-up included, with the CUDA parts played."""
    capture, lines = FakeCapture(), []
    lane = LateLane(3, 0.5)
    monkeypatch.setattr(gpu_steps, "CudaLane", lambda device: lane)
    monkeypatch.setattr(gpu_steps, "CudaCapture", lambda: capture)
    options = {"max_num_seqs": 5, "max_num_batched_tokens": 24, "block_size": BLOCK_SIZE, "admission": "greedy"}
    config = JobConfig.from_options({**options, "enforce_eager": enforce_eager})
    answers = []
    for device in ("cpu", "cuda"):
        model = LoadedModel(decoder, PieceTokenizer(), device, 0, frozenset({7}))
        engine = local._engine(config, model, make_cache(decoder), 50, True, lines.append)
        requests = [make_request(i, [i, 5, 9] * (1 + i), 12, frequency_penalty=0.2 * (i % 2)) for i in range(8)]
        answers.append({request_id: r.token_ids for request_id, r in run(engine, requests).items()})
    assert answers[0] == answers[1]
    assert lane.num_waits > 5
    assert (capture.num_replayed > 5) != enforce_eager
    (line,) = lines
    assert line.startswith("GPU made ready in ")
    assert line.endswith("compiled" if enforce_eager else "4 graphs of decode steps captured")  # of 1, 2, 4 and 5 rows


def step_inputs(num_seqs: int, blocks: np.ndarray) -> StepInputs:
    """Sequence i has one block, blocks[i], and computes its first token; the last one's is not known to the host."""
    token_ids = np.arange(num_seqs)
    token_ids[-1] = -1
    return StepInputs(
        token_ids=token_ids,
        positions=np.zeros(num_seqs, np.int64),
        slot_mapping=blocks * BLOCK_SIZE,
        block_table=blocks[:, None].astype(np.int32),
        cu_seqlens_q=np.arange(num_seqs + 1, dtype=np.int32),
        seq_lens=np.ones(num_seqs, np.int32),
        logits_indices=np.arange(num_seqs),
        late_slots=np.arange(num_seqs) + 2,
    )


@torch.inference_mode()
def test_rows_that_fill_a_graph_up_are_never_written_or_read(decoder):
    """Case 50: five sequences in a graph for eight, after one of eight whose rows are still in the buffers."""
    cache = make_cache(decoder, fill=0.5)
    last_tokens = torch.full((12,), 33)
    graphs = DecodeGraphs(GraphPlan(FakeCapture(), (8,), (6,)), decoder, cache, last_tokens)
    before = [cache.key(layer).clone() for layer in range(2)]
    assert all((key == 0.5).all() for key in before)  # captures wrote nothing
    lens = np.ones(8, np.int32)
    blocks = np.arange(90, 98)
    graphs.prepare(step_inputs(8, blocks), lens, torch.from_numpy)()
    for layer in range(2):
        cache.key(layer)[90:98] = torch.nan  # whoever reads those rows again breaks
        cache.value(layer)[90:98] = torch.nan
    last_tokens[6] = 44  # of the fifth sequence
    work = graphs.prepare(step_inputs(5, np.arange(5)), lens[:5], torch.from_numpy)
    hidden = work()
    assert hidden.shape == (5, 48)
    assert hidden.isfinite().all()
    for layer in range(2):
        for stored in (cache.key(layer), cache.value(layer)):
            assert (stored[5:90] == 0.5).all()
            assert stored[90:98].isnan().all()
            assert (stored[98:] == 0.5).all()
            assert (stored[:5, :, 0] != 0.5).any(dim=-1).all()
    alone = step_inputs(5, np.arange(5))
    alone.token_ids[-1] = 44
    plain = DecodeGraphs(GraphPlan(FakeCapture(), (5,), (1,)), decoder, make_cache(decoder), last_tokens)
    assert torch.equal(hidden, plain.prepare(alone, lens[:5], torch.from_numpy)())


def test_steps_that_no_graph_fits_run_without(decoder):
    graphs = DecodeGraphs(GraphPlan(FakeCapture(), (2, 4), (1,)), decoder, make_cache(decoder), torch.zeros(12).long())
    lens = np.ones(5, np.int32)
    assert graphs.prepare(step_inputs(4, np.arange(4)), lens[:4], torch.from_numpy) is not None
    assert graphs.prepare(step_inputs(5, np.arange(5)), lens, torch.from_numpy) is None
    two_blocks = step_inputs(2, np.arange(2))
    wide = replace(two_blocks, block_table=np.zeros((2, 2), np.int32))
    assert graphs.prepare(wide, lens[:2], torch.from_numpy) is None
    chunk = replace(two_blocks, token_ids=np.zeros(3, np.int64))
    assert graphs.prepare(chunk, lens[:2], torch.from_numpy) is None


def test_warming_up_touches_nothing_of_the_cache(decoder):
    cache, sizes = make_cache(decoder, fill=0.5), []

    class Watching:
        device, vocab_size = decoder.device, decoder.vocab_size

        def forward(self, batch, cache, prompt_lens):
            sizes.append((len(batch.token_ids), len(batch.seq_lens)))
            return decoder.forward(batch, cache, prompt_lens)

        def compute_logits(self, hidden):
            assert len(hidden) <= 3
            return decoder.compute_logits(hidden)

    warm_up(Watching(), cache, max_num_batched_tokens=20, max_num_seqs=6, max_blocks=7, most_logits=3)
    assert sizes == [(n, 1) for n in (1, 2, 4, 8, 16, 20, 2)] + [(n, n) for n in (1, 2, 4, 6)]
    for layer in range(2):
        assert (cache.key(layer) == 0.5).all()
        assert (cache.value(layer) == 0.5).all()


def test_graphs_read_the_tables_of_keys_that_they_were_captured_with():
    """Those of an 8-bit cache grow with the positions asked for; what a graph reads must neither move nor be freed."""
    decoder = make_decoder("default")
    decoder.take_off_keys([KeyStatistics(torch.ones(2, 12), torch.ones(2, 12), torch.zeros(2, 12))] * 2)
    cache = PagedKVCache(decoder.kv_cache_spec(BLOCK_SIZE, "fp8"), NUM_BLOCKS)
    graphs = GraphPlan(FakeCapture(), (4,), (13,))
    runner = ModelRunner(decoder, cache, 4, 50, BLOCK_SIZE, frozenset(), ImmediateQueue(), 2, graphs)
    captured = [table for layer in range(2) for table in decoder._key_offsets.tables(layer)]
    runner.warm_up(max_num_batched_tokens=16)
    now = [table for layer in range(2) for table in decoder._key_offsets.tables(layer)]
    assert all(a is b for a, b in zip(captured, now, strict=True))
    decoder._key_offsets.cover(5000)  # for an engine of longer sequences
    assert decoder._key_offsets.tables(0)[0] is not captured[0]
    seen = [weakref.ref(table) for table in captured]
    del captured, now
    assert all(table() is not None for table in seen)


def test_stacks_reach_attention_in_captured_steps_and_in_others(monkeypatch):
    """Sequences with one prompt of two segments: attention is told of stacks of the step's own rows, whose tables begin
    alike; and answers stay the plain loop's."""
    from batchinfer.kernels.paged_attention import segments

    from batchinfer.engine import key_stacks
    from batchinfer.models import attention

    monkeypatch.setattr(key_stacks, "SEGMENT_KEYS", 8)
    monkeypatch.setattr(segments, "SEGMENT_KEYS", 8)
    decoder, seen, real = make_decoder("default"), [], attention.paged_attention

    def spied(q, *arguments, stacks, **options):
        offsets, lens = arguments[3], arguments[4]
        if stacks is not None and q.shape[0] and int(lens.max()) > 0:
            seen.append((stacks.clone(), offsets.diff().clone(), lens.clone(), arguments[2].clone()))
        return real(q, *arguments, **options)

    common = np.random.default_rng(0).integers(0, VOCAB, 17).tolist()
    requests = [make_request(0, common, 14), *(make_request(i, [*common, i], 9) for i in range(1, 6))]
    plain = run(make_engine(decoder), requests)
    monkeypatch.setattr(attention, "paged_attention", spied)
    capture, queue = FakeCapture(), StagedQueue(LateLane(1, 0.5))
    finder = key_stacks.KeyStacks(4, BLOCK_SIZE)
    options = {"max_steps_in_flight": 2, "queue": queue, "graphs": GraphPlan(capture, (4, 8), (13,))}
    results = run(make_engine(decoder, key_stacks=finder, **options), requests)
    assert {i: r.token_ids for i, r in results.items()} == {i: r.token_ids for i, r in plain.items()}
    assert capture.num_replayed > 3
    kinds = set()
    for stacks, q_lens, lens, table in seen:
        for row in np.flatnonzero(stacks[:, 0].numpy() * (lens.numpy() > 0)).tolist():
            members = [member for member in stacks[row, 1:].tolist() if member >= 0]
            assert row in members
            assert (q_lens[members] == 1).all()
            assert len({tuple(table[member, : 2 * int(stacks[row, 0])].tolist()) for member in members}) == 1
            kinds.add((bool((q_lens == 1).all()), int(stacks[row, 0]), len(members)))
    assert any(is_decode and segments == 2 and size == 4 for is_decode, segments, size in kinds)
    assert any(not is_decode for is_decode, *_ in kinds)  # beside a chunk of a prompt
