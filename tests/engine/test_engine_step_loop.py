"""The engine over a model without weights: tokens against a naive generator, whatever is batched, cut, cached or
preempted."""

import numpy as np
import pytest
import torch
from batchinfer.kernels import sampling
from stand_in import (
    VOCAB,
    PieceTokenizer,
    StandInModel,
    context_features,
    logits_of,
    make_engine,
    make_request,
    naive_greedy,
    run,
)

from batchinfer.errors import BatchInferError, ErrorCode
from batchinfer.request import Request

SMALL_CACHE = {"num_blocks": 24, "max_model_len": 84, "max_num_seqs": 6}
PREEMPTING = {**SMALL_CACHE, "admission": "greedy"}  # a forecast would leave no reason to preempt
SETTINGS = {
    "ample": {},
    "alone": {"max_num_seqs": 1},
    "small-chunks": {"max_num_batched_tokens": 3, "max_num_seqs": 3},
    "odd-chunks": {"max_num_batched_tokens": 17, "block_size": 5},
    "big-blocks": {"block_size": 32, "num_blocks": 50},
    "no-prefix-cache": {"enable_prefix_caching": False},
    "waiting-for-blocks": SMALL_CACHE,
    "preempting": PREEMPTING,
    "preempting-no-prefix-cache": {**PREEMPTING, "enable_prefix_caching": False},
    "two-steps-in-flight": {"max_steps_in_flight": 2, "max_num_seqs": 4},
}


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def prompts() -> list[list[int]]:
    """Lengths 1 to 41, the last few with a common beginning."""
    rng = np.random.default_rng(3)
    different = [rng.integers(0, VOCAB, n).tolist() for n in (1, 2, 7, 8, 13, 24, 41)]
    common = rng.integers(0, VOCAB, 19).tolist()
    return different + [common + rng.integers(0, VOCAB, n).tolist() for n in (1, 3, 6)] + [common[:16]]


def mixed_requests() -> list[Request]:
    """Greedy and drawn rows, with penalties, bias, log-probabilities and several samples."""
    variants = [
        {"temperature": 0.0},
        {"temperature": 0.9, "seed": 42},
        {"temperature": 1.3, "top_p": 0.8, "repetition_penalty": 1.2},
        {"temperature": 0.0, "presence_penalty": 1.5, "frequency_penalty": 0.5, "logprobs": 2},
        {"temperature": 0.7, "top_k": 9, "min_p": 0.02, "logit_bias": ((5, 3.0), (6, -50.0)), "min_tokens": 4},
    ]
    requests = [make_request(i, p, 30, **variants[i % len(variants)]) for i, p in enumerate(prompts())]
    return requests + [make_request(20, prompts()[3], 30, sample, temperature=1.0, n=3) for sample in range(3)]


@pytest.mark.parametrize("name", SETTINGS)
def test_greedy_tokens_equal_the_naive_generator(name):
    engine, pool = make_engine(**SETTINGS[name])
    results = run(engine, [make_request(i, prompt, 40) for i, prompt in enumerate(prompts())])
    for i, prompt in enumerate(prompts()):
        result = results[make_request(i, prompt, 1).id]
        assert result.token_ids == naive_greedy(prompt, 40)
        assert result.text == "".join(f"<{t}>" for t in result.token_ids)
        assert (result.finish_reason, result.stop_reason, result.prompt_tokens) == ("length", None, len(prompt))
    preemptions = sum(r.num_preemptions for r in results.values())
    assert (preemptions > 0) == name.startswith("preempting")
    assert pool.num_free_blocks == pool.num_blocks
    pool.check_integrity()


@pytest.fixture(scope="module")
def undisturbed():
    return run(make_engine(max_num_seqs=32)[0], mixed_requests())


@pytest.mark.parametrize("name", SETTINGS)
def test_drawn_tokens_do_not_depend_on_batch_order_or_preemption(undisturbed, name):
    engine, _ = make_engine(**SETTINGS[name])
    results = run(engine, mixed_requests()[::-1])
    assert results.keys() == undisturbed.keys()
    for request_id, expected in undisturbed.items():
        result = results[request_id]
        assert (result.token_ids, result.text, result.logprobs) == (
            expected.token_ids,
            expected.text,
            expected.logprobs,
        )
    if name.startswith("preempting"):
        assert sum(r.num_preemptions for r in results.values()) > 0


def test_samples_of_one_row_differ(undisturbed):
    drawn = [undisturbed[make_request(20, [0], 1, sample, n=3).id].token_ids for sample in range(3)]
    assert len(drawn[0]) == 30
    assert drawn[0] != drawn[1] != drawn[2] != drawn[0]


def test_two_sequences_of_cache_serve_eight_long_rows():
    rows = [make_request(i, [i, 3], 100, temperature=0.0 if i % 2 else 1.0) for i in range(8)]
    ample = run(make_engine(max_num_seqs=8, num_blocks=400)[0], rows)
    engine, _ = make_engine(max_num_seqs=8, num_blocks=52, admission="greedy")  # 26 blocks a sequence of 102 tokens
    tight = run(engine, rows)
    assert sum(r.num_preemptions for r in tight.values()) > 8
    assert {k: r.token_ids for k, r in tight.items()} == {k: r.token_ids for k, r in ample.items()}
    assert all(len(r.token_ids) == 100 for r in tight.values())


def test_a_drawn_token_is_the_sampling_rule_on_the_models_logits():
    request = make_request(4, [9, 8, 7], 12, temperature=0.8, top_p=0.9)
    tokens = run(make_engine()[0], [request])[request.id].token_ids
    key = torch.from_numpy(np.array([request.noise_key], np.uint64).astype(np.int64))
    context = [9, 8, 7]
    for token in tokens:
        logits = torch.from_numpy(logits_of(context_features(np.array(context))[-1:])).float()
        expected, _ = sampling.sample(
            logits, torch.tensor([0.8]), torch.tensor([0.0]), torch.tensor([0]), torch.tensor([0.9]), key,
            torch.tensor([len(context)]),
        )  # fmt: skip
        assert token == int(expected)
        context.append(token)


@pytest.mark.parametrize("mates", [[], [{}], [{"seed": 7}, {"seed": 42}, {"temperature": 0.0}]])
def test_a_seeded_row_does_not_depend_on_its_place_or_mates(mates):
    row = {"temperature": 1.0, "seed": 42}
    first = make_request(0, [1, 2, 3], 30, **row)
    alone = run(make_engine()[0], [first])[first.id].token_ids
    others = [make_request(i + 1, [5, i], 30, **{"temperature": 1.0, **mate}) for i, mate in enumerate(mates)]
    moved = make_request(9, [1, 2, 3], 30, **row)
    assert run(make_engine()[0], [*others, moved])[moved.id].token_ids == alone


def test_any_end_of_sequence_token_ends_a_row():
    """The ends named by generation_config and by the tokenizer count alike."""
    prompt = prompts()[2]
    tokens = naive_greedy(prompt, 40)
    for eos in (tokens[3], tokens[11]):
        engine, _ = make_engine(eos_token_ids=frozenset({eos, 59}), tokenizer=PieceTokenizer(special=frozenset({eos})))
        kept = make_request(1, prompt, 40, ignore_eos=True)
        stopped = make_request(0, prompt, 40)
        results = run(engine, [stopped, kept])
        end = tokens.index(eos) + 1
        assert results[stopped.id].token_ids == tokens[:end]
        assert (results[stopped.id].finish_reason, results[stopped.id].stop_reason) == ("stop", None)
        assert results[stopped.id].text == "".join(f"<{t}>" for t in tokens[: end - 1])
        assert results[kept.id].token_ids == tokens
        assert results[kept.id].finish_reason == "length"


def test_min_tokens_bars_the_end_and_stop_ids():
    prompt = prompts()[2]
    tokens = naive_greedy(prompt, 40)
    engine, _ = make_engine(eos_token_ids=frozenset({tokens[2]}))
    row = make_request(0, prompt, 40, min_tokens=10, stop_token_ids=(tokens[4],))
    result = run(engine, [row])[row.id]
    assert not {tokens[2], tokens[4]} & set(result.token_ids[:10])
    assert len(result.token_ids) >= 11 or result.finish_reason == "length"


def test_a_row_out_of_bounds_fails_alone():
    good = [make_request(i, p, 20) for i, p in enumerate(prompts()[:7])]
    bad = {
        ErrorCode.BAD_PARAMETER: [
            make_request(50, [1], 5, logit_bias=((999_999, 5.0),)),
            make_request(51, [1], 5, logit_bias=((-1, 5.0),)),
            make_request(52, [1], 5, stop_token_ids=(VOCAB,)),
        ],
        ErrorCode.EMPTY_PROMPT: [make_request(53, [], 5)],
        ErrorCode.BAD_PROMPT: [make_request(54, [1, VOCAB], 5), make_request(55, [-1], 5)],
        ErrorCode.PROMPT_TOO_LONG: [make_request(56, [1] * 116, 5)],
    }
    results = run(make_engine()[0], [*good[:3], *(r for rows in bad.values() for r in rows), *good[3:]])
    for code, rows in bad.items():
        for row in rows:
            result = results[row.id]
            assert (result.finish_reason, result.error_code) == ("error", code)
            assert (result.text, result.token_ids, result.times) == (None, None, None)
    assert "999999" in results[bad[ErrorCode.BAD_PARAMETER][0].id].error_message
    for i, row in enumerate(good):
        assert results[row.id].token_ids == naive_greedy(prompts()[i], 20)


@pytest.mark.parametrize("settings", [{}, {"max_num_batched_tokens": 5}, {"max_steps_in_flight": 2}])
def test_a_numerical_fault_ends_its_row_and_leaves_the_others_alone(settings):
    """The poisoned row shares its beginning with healthy ones; its KV must not be served again."""
    poison = 60
    shared = [4, 8, 15, 16, 23, 42, 7, 9]
    healthy = [make_request(i, [*shared, i], 20, logit_bias=((poison, -100.0),)) for i in range(4)]
    sick = [make_request(10 + i, [*shared, 1, 2, poison, 5, 6, 7, i], 20) for i in range(2)]
    engine, pool = make_engine(poisoned_token=poison, **settings)
    results = run(engine, [healthy[0], sick[0], *healthy[1:], sick[1]])
    for row in sick:
        assert (results[row.id].finish_reason, results[row.id].error_code) == ("error", ErrorCode.NUMERICAL)
    apart = run(make_engine(poisoned_token=poison)[0], healthy)
    for row in healthy:
        assert results[row.id].token_ids == apart[row.id].token_ids
    cached = pool.match_prefix(np.array([*shared, 1, 2, poison, 5, 6, 7, 0], np.int32))
    assert len(cached) * 4 <= len(shared)
    pool.free(cached)
    pool.check_integrity()


def test_prompt_scores_and_log_probabilities_equal_the_log_softmax():
    prompt = prompts()[6]
    row = make_request(0, prompt, 6, prompt_logprobs=True, logprobs=3)
    expected = torch.from_numpy(logits_of(context_features(np.array(prompt + naive_greedy(prompt, 6))))).log_softmax(-1)
    for name in ("ample", "small-chunks", "preempting"):
        engine, _ = make_engine(**SETTINGS[name])
        crowd = [make_request(i, p, 20) for i, p in enumerate(prompts(), start=1)]
        result = run(engine, [*crowd, row])[row.id]
        scores = result.prompt_logprobs
        assert scores.count == len(prompt) - 1 == len(scores.per_token)
        by_hand = expected[torch.arange(len(prompt) - 1), torch.tensor(prompt[1:])]
        np.testing.assert_allclose(scores.per_token, by_hand, atol=2e-6)
        assert scores.sum == pytest.approx(float(by_hand.sum()), abs=1e-4)
        for step, entry in enumerate(result.logprobs):
            at = expected[len(prompt) - 1 + step]
            assert entry.token_id == result.token_ids[step]
            assert entry.logprob == pytest.approx(float(at[entry.token_id]), abs=2e-6)
            assert [t for t, _ in entry.top] == at.topk(3).indices.tolist()
            assert [p for _, p in entry.top] == pytest.approx(at.topk(3).values.tolist(), abs=2e-6)
        assert result.cumulative_logprob == pytest.approx(sum(e.logprob for e in result.logprobs))


def test_prompts_are_scored_once_when_preempted_midway():
    rows = [make_request(i, p, 40, prompt_logprobs=True) for i, p in enumerate(prompts()) if len(p) > 6]
    engine, _ = make_engine(num_blocks=24, max_model_len=84, max_num_batched_tokens=9, admission="greedy")
    results = run(engine, rows)
    assert sum(r.num_preemptions for r in results.values()) > 0
    for row in rows:
        ids = row.prompt_token_ids
        expected = torch.from_numpy(logits_of(context_features(ids.astype(np.int64)))).log_softmax(-1)
        by_hand = expected[torch.arange(len(ids) - 1), torch.from_numpy(ids[1:].astype(np.int64))]
        np.testing.assert_allclose(results[row.id].prompt_logprobs.per_token, by_hand, atol=2e-6)


def test_logits_are_made_a_few_rows_at_a_time(undisturbed, monkeypatch):
    sizes = []

    class Counting(StandInModel):
        def compute_logits(self, hidden, scratch=None):
            sizes.append(len(hidden))
            return super().compute_logits(hidden)

    monkeypatch.setattr("batchinfer.engine.model_runner._LOGITS_ELEMENTS", 3 * VOCAB + 1)
    results = run(make_engine(max_num_seqs=32, model=Counting(4))[0], mixed_requests())
    assert max(sizes) == 3
    for request_id, expected in undisturbed.items():
        assert results[request_id].token_ids == expected.token_ids
        assert results[request_id].logprobs == expected.logprobs


@pytest.mark.parametrize("length", [1, 2, 40, 120])
def test_max_tokens_0_scores_the_prompt_only(length):
    row = make_request(0, [3] * length, 0, prompt_logprobs=True)
    result = run(make_engine(max_num_batched_tokens=16)[0], [row])[row.id]
    assert (result.token_ids, result.text, result.finish_reason) == ([], "", "length")
    assert result.prompt_logprobs.count == length - 1
    assert result.times.ttft_ms is None
    assert result.times.latency_ms > 0


def test_times_follow_the_clock():
    ticks = iter(range(1, 1000))
    engine, _ = make_engine(clock=lambda: float(next(ticks)))
    row = make_request(0, [1, 2], 3)
    engine.add(row, arrival_time=0.0)
    results = []
    while engine.has_unfinished:
        results += engine.step()
    times = results[0].times
    # 1: first scheduled; 2, 3, 4: the commits of the three tokens
    assert (times.queue_ms, times.prefill_ms, times.ttft_ms, times.latency_ms) == (1000, 1000, 2000, 4000)
    assert (times.tbt_mean_ms, times.tbt_p50_ms, times.tbt_max_ms) == (1000, 1000, 1000)
    assert engine.stats.tbt_ms.count == 2


def test_statistics_count_steps_tokens_and_blocks():
    engine, _ = make_engine(num_blocks=40, enable_prefix_caching=False)
    run(engine, [make_request(0, [1] * 10, 3), make_request(1, [2] * 5, 1)])
    stats = engine.stats
    # step 1: both prompts; steps 2 and 3: one token of the first
    assert (stats.steps, stats.scheduled_tokens, stats.peak_batch_size) == (3, 17, 2)
    assert stats.mean_batch_size == pytest.approx(4 / 3)
    # 10 tokens in 3 blocks and 5 in 2; then 11 and 12 tokens in 3
    assert (stats.kv_blocks_total, stats.kv_blocks_peak) == (40, 5)
    assert stats.kv_blocks_mean == pytest.approx(11 / 3)
    assert stats.to_dict()["tbt_ms"]["max"] == stats.tbt_ms.max
    assert min(stats.schedule_s, stats.forward_s, stats.sample_s, stats.postprocess_s) > 0


def test_cached_prompt_tokens_are_reported():
    engine, _ = make_engine()
    first, second = (make_request(i, [*range(10), i], 2) for i in (0, 1))
    assert run(engine, [first])[first.id].cached_prompt_tokens == 0
    assert run(engine, [second])[second.id].cached_prompt_tokens == 8  # two whole blocks of 4


def test_a_request_that_is_running_cannot_be_added_again():
    engine, _ = make_engine()
    engine.add(make_request(0, [1], 5))
    with pytest.raises(ValueError, match="0-0-0 is running"):
        engine.add(make_request(0, [2], 5))


def test_a_cache_smaller_than_one_sequence_is_refused():
    with pytest.raises(ValueError, match="max_model_len = 120"):
        make_engine(num_blocks=29, block_size=4)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (MemoryError(), "out of memory in a step of 3 tokens in 1 sequences"),
        (torch.OutOfMemoryError("CUDA out of memory. Tried"), "lower --max-num-batched-tokens"),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried"), "out of memory"),
        (torch.AcceleratorError("CUDA error: an illegal memory access"), "the device failed in a step of 3 tokens"),
    ],
)
def test_device_faults_end_the_job_in_one_line(fault, message):
    class Failing(StandInModel):
        def forward(self, batch, cache, prompt_lens):
            raise fault

    engine, _ = make_engine(model=Failing(4))
    engine.add(make_request(0, [1, 2, 3], 5))
    with pytest.raises(BatchInferError, match=message) as caught:
        engine.step()
    assert "\n" not in str(caught.value)


def test_a_fault_of_the_program_stays_itself():
    class Failing(StandInModel):
        def forward(self, batch, cache, prompt_lens):
            raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")

    engine, _ = make_engine(model=Failing(4))
    engine.add(make_request(0, [1, 2, 3], 5))
    with pytest.raises(RuntimeError, match="mat1"):
        engine.step()


class ScarceModel(StandInModel):
    """Has memory for a few tokens at once."""

    def __init__(self, block_size: int, most_tokens: int) -> None:
        super().__init__(block_size)
        self.most_tokens = most_tokens
        self.sizes: list[int] = []

    def forward(self, batch, cache, prompt_lens):
        self.sizes.append(len(batch.token_ids))
        if len(batch.token_ids) > self.most_tokens:
            raise torch.OutOfMemoryError("no memory for the activations")
        return super().forward(batch, cache, prompt_lens)


@pytest.mark.parametrize("most_tokens", [1, 5, 20])
def test_a_step_without_memory_is_cut_and_later_ones_are_smaller(most_tokens):
    model = ScarceModel(4, most_tokens)
    scarce, expected = run(make_engine(model=model)[0], mixed_requests()), run(make_engine()[0], mixed_requests())
    for request_id, result in expected.items():
        assert scarce[request_id].token_ids == result.token_ids
        assert scarce[request_id].logprobs == result.logprobs
    assert 0 < sum(size > most_tokens for size in model.sizes) <= 6  # from 64 tokens down to 1 in halves


def test_no_memory_for_one_token_ends_the_job_in_one_line():
    with pytest.raises(BatchInferError, match=r"out of memory in a step of .* lower --max-num-batched-tokens"):
        run(make_engine(model=ScarceModel(4, 0))[0], mixed_requests())
