"""The step loop with several steps in flight on a device that runs beside the host: the answers are those of the plain
loop, whatever the device's delays, and the host waits for nothing but results."""

import functools
import random
import time

import numpy as np
import pytest
import torch
from batchinfer.kernels import sampling
from fake_device import FakeCapture, LateLane, LateMark, PromptLane, ThreadLane
from stand_in import VOCAB, StandInModel, make_engine, make_request, naive_greedy, run

from batchinfer.engine.cuda_graphs import GraphPlan, graph_sizes, graph_widths
from batchinfer.engine.model_runner import ModelRunner
from batchinfer.engine.prompt_scores import PromptScores
from batchinfer.engine.staged_queue import Lane, StagedQueue
from batchinfer.engine.step_in_flight import InFlightStep
from batchinfer.errors import BatchInferError, ErrorCode
from batchinfer.request import Request, RequestId, Result

POISON = 60
SETTINGS = {
    "ample": {},
    "two-at-once": {"max_num_seqs": 2},
    "small-chunks": {"max_num_batched_tokens": 5, "max_num_seqs": 4},
    "preempting": {"num_blocks": 24, "max_model_len": 84, "max_num_seqs": 6, "admission": "greedy"},
    "preempting-no-prefix-cache": {
        **{"num_blocks": 24, "max_model_len": 84, "max_num_seqs": 6, "admission": "greedy"},
        **{"enable_prefix_caching": False, "max_num_batched_tokens": 17},
    },
}
VARIANTS = [
    {"temperature": 0.0},
    {"temperature": 0.0, "stop": ("7>", "<3><1")},
    {"temperature": 0.9, "seed": 42, "stop_token_ids": (11, 23)},
    {"temperature": 1.3, "top_p": 0.8, "repetition_penalty": 1.2, "stop": ("9>",), "include_stop_str_in_output": True},
    {"temperature": 0.0, "presence_penalty": 1.5, "frequency_penalty": 0.5, "logprobs": 2},
    {"temperature": 0.7, "top_k": 9, "min_p": 0.02, "logit_bias": ((5, 3.0), (6, -50.0)), "min_tokens": 4},
    {"temperature": 1.0, "logprobs": 0, "prompt_logprobs": True, "ignore_eos": True},
    {"temperature": 0.0, "frequency_penalty": 0.3, "min_tokens": 6, "stop": ("5>",), "prompt_logprobs": True},
]


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def random_requests(seed: int, num_rows: int = 11) -> list[Request]:
    """Prompts of 1 to 40 tokens, some with a common beginning; every kind of parameter; one row of three samples and
    one that is only scored."""
    rng = random.Random(seed)
    common = [rng.randrange(VOCAB - 1) for _ in range(19)]
    requests = []
    for row in range(num_rows):
        prompt = common[: rng.choice([0, 0, 9, 16, 19])] + [rng.randrange(VOCAB) for _ in range(rng.randrange(1, 21))]
        params = VARIANTS[(row + seed) % len(VARIANTS)]
        requests.append(make_request(row, prompt, rng.randrange(6, 31), **params))
    requests += [make_request(num_rows, common, 20, sample, temperature=1.0, n=3) for sample in range(3)]
    return [*requests, make_request(num_rows + 1, [*common, 1, 2], 0, prompt_logprobs=True)]


def answers(results: dict[RequestId, Result]) -> dict[RequestId, tuple[object, ...]]:
    """All that a row is told, but for times and what depends on the schedule."""

    def scores(result: Result) -> bytes | None:
        return None if result.prompt_logprobs is None else result.prompt_logprobs.per_token.tobytes()

    return {
        request_id: (
            *(r.finish_reason, r.error_code, r.token_ids, r.text, r.stop_reason, r.logprobs, r.cumulative_logprob),
            scores(r),
        )
        for request_id, r in results.items()
    }


def make_overlapped(lane: Lane, max_steps_in_flight: int, *, capture: FakeCapture | None = None, **settings):
    """An engine on the lane, of which decode steps are captured where `capture` is given."""
    rows = settings.get("max_num_seqs", 8)
    blocks = -(-settings.get("max_model_len", 120) // 4)
    graphs = GraphPlan(capture, graph_sizes(rows), (max(1, blocks // 3), blocks)) if capture else None
    return make_engine(queue=StagedQueue(lane), max_steps_in_flight=max_steps_in_flight, graphs=graphs, **settings)


def options_of(seed: int) -> dict[str, object]:
    """Every other model breaks at a token."""
    return {"eos_token_ids": frozenset({30})} | ({"poisoned_token": POISON} if seed % 2 else {})


@functools.cache
def plain_answers(seed: int) -> dict[RequestId, tuple[object, ...]]:
    return answers(run(make_engine(max_num_seqs=32, **options_of(seed))[0], random_requests(seed)))


def check_against_plain(seed: int, name: str, lane: Lane, steps: int, capture: FakeCapture | None) -> list[Result]:
    requests, options = random_requests(seed), options_of(seed)
    engine, pool = make_overlapped(lane, steps, capture=capture, **options, **SETTINGS[name])
    results = run(engine, requests)
    assert answers(results) == plain_answers(seed)
    assert "poisoned_token" not in options or any(r.error_code is ErrorCode.NUMERICAL for r in results.values())
    assert pool.num_free_blocks == pool.num_blocks
    pool.check_integrity()
    return list(results.values())


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("steps", [1, 2, 3])
def test_answers_equal_the_plain_loops(name, steps):
    """Device as late as can be, and at random; half of the runs on captured steps."""
    preemptions = 0
    for seed, eagerness in ((0, 0.0), (1, 1.0)):
        capture = FakeCapture() if (seed + steps) % 2 else None
        results = check_against_plain(seed, name, LateLane(seed, eagerness), steps, capture)
        preemptions += sum(r.num_preemptions or 0 for r in results)  # None where a row failed
        assert capture is None or capture.num_replayed > 5
    assert preemptions > 0 or not name.startswith("preempting")


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2, 22))
def test_answers_equal_the_plain_loops_in_many_runs(seed):
    rng = random.Random(seed)
    for name in SETTINGS:
        capture = rng.choice([None, FakeCapture()])
        lane = LateLane(seed, rng.choice([0.0, 0.3, 1.0, 3.0]))
        check_against_plain(seed, name, lane, rng.choice([2, 2, 3, 4]), capture)


@pytest.mark.parametrize(("name", "steps", "seed"), [("preempting", 2, 4), ("small-chunks", 3, 5), ("ample", 2, 7)])
def test_answers_equal_the_plain_loops_on_a_thread_that_sleeps(name, steps, seed):
    with ThreadLane(seed, longest_sleep_s=0.001) as lane:
        check_against_plain(seed, name, lane, steps, FakeCapture() if seed % 2 else None)


class Impatient(LateMark):
    """Does not wait."""

    def wait(self) -> None:
        pass


class Careless(LateMark):
    """Says at once that a copy has ended."""

    def is_reached(self) -> bool:
        return True


@pytest.mark.parametrize("mark_class", [Impatient, Careless])
def test_a_loop_that_reads_or_overwrites_too_early_is_found_out(mark_class, monkeypatch):
    """The fake device is of no use unless such faults show."""
    requests = [make_request(i, [i, 3], 12, temperature=0.0) for i in range(4)]
    engine, _ = make_overlapped(LateLane(), 2)
    assert run(engine, requests)[requests[3].id].token_ids == naive_greedy([3, 3], 12)
    monkeypatch.setattr("fake_device.LateMark", mark_class)
    engine, _ = make_overlapped(LateLane(), 2)
    try:
        results = run(engine, requests)
    except (ValueError, AssertionError, IndexError, RuntimeError):
        return
    assert any(results[r.id].token_ids != naive_greedy([i, 3], 12) for i, r in enumerate(requests))


def watch_submits(monkeypatch, lane: LateLane) -> list[int]:
    """How often each later submit waits for the device."""
    waits, submit = [], ModelRunner.submit

    def watched(self, output):
        before = lane.num_waits
        handle = submit(self, output)
        waits.append(lane.num_waits - before)
        return handle

    monkeypatch.setattr(ModelRunner, "submit", watched)
    return waits


@pytest.mark.parametrize(("variant", "steps", "waits"), [(VARIANTS, 2, False), (VARIANTS, 3, True), (None, 3, False)])
def test_submit_waits_for_nothing_unless_penalties_hang_on_older_steps(variant, steps, waits, monkeypatch):
    """With two steps in flight never; with three where a token that a penalty counts is not there yet."""
    lane = LateLane()
    plain = [v for v in VARIANTS if not {"repetition_penalty", "presence_penalty", "frequency_penalty"} & v.keys()]
    chosen = variant or plain
    rows = [make_request(i, [i, 5, 9], 20, **chosen[i % len(chosen)]) for i in range(12)]
    engine, _ = make_overlapped(lane, steps)
    found = watch_submits(monkeypatch, lane)
    run(engine, rows)
    assert len(found) > 20
    assert any(found) == waits


def test_the_host_is_a_step_ahead_and_a_stop_costs_one_token():
    """A stopped row has at most one surplus token computed with two steps in flight; one that ends by length none."""
    prompts = [[i, 1, 2] for i in range(5)]
    answer = [naive_greedy(prompt, 30) for prompt in prompts]
    cut = [next(i for i in range(3, 30) if tokens.index(tokens[i]) == i) for tokens in answer]
    stopped = [make_request(i, p, 30, stop=(f"<{answer[i][cut[i]]}>",)) for i, p in enumerate(prompts)]
    cases = ((stopped, len(prompts)), ([make_request(i, p, 9) for i, p in enumerate(prompts)], 0))
    for requests, surplus in cases:
        plain, _ = make_engine()
        overlapped, _ = make_overlapped(LateLane(), 2)
        assert answers(run(plain, requests)) == answers(run(overlapped, requests))
        assert overlapped.stats.scheduled_tokens == plain.stats.scheduled_tokens + surplus
        assert overlapped.stats.sampled_tokens == plain.stats.sampled_tokens


def test_uploads_and_buffers_stay_few():
    lane = LateLane(1, 1.0)
    engine, _ = make_overlapped(lane, 2)
    run(engine, random_requests(2))
    assert engine.stats.steps > 25
    assert lane.num_buffers < 20  # each step uploads two parcels; two steps and their late sampling are in flight


def test_times_are_the_devices_and_do_not_overlap():
    with ThreadLane(0, longest_sleep_s=0.002) as lane:
        engine, _ = make_overlapped(lane, 2)
        start = time.perf_counter()
        run(engine, [make_request(i, [i, 2], 10, logprobs=1, prompt_logprobs=True) for i in range(4)])
        wall_s = time.perf_counter() - start
    assert 0 < engine.stats.sample_s < wall_s
    assert 0 < engine.stats.forward_s < wall_s - engine.stats.sample_s


def start_some(engine, num_rows: int = 14) -> list[Request]:
    requests = [make_request(i, [i, 7, 9], 20, temperature=0.0) for i in range(num_rows)]
    for request in requests:
        engine.add(request)
    for _ in range(5):
        engine.step()
    return requests


@pytest.mark.parametrize("steps", [2, 3])
def test_abandon_with_steps_in_flight_leaves_an_idle_engine(steps):
    engine, pool = make_overlapped(LateLane(), steps, capture=FakeCapture())
    start_some(engine)
    engine.abandon()
    assert not engine.has_unfinished
    assert pool.num_free_blocks == pool.num_blocks
    requests = random_requests(6)
    assert answers(run(engine, requests)) == answers(run(make_engine(max_num_seqs=32)[0], requests))


class InterruptedModel(StandInModel):
    num_passes = 0

    def forward(self, batch, cache, prompt_lens):
        self.num_passes += 1
        if self.num_passes == 2:  # with it a prompt that the first pass began
            raise KeyboardInterrupt
        return super().forward(batch, cache, prompt_lens)


@pytest.mark.parametrize("steps", [1, 2, 3])
@pytest.mark.parametrize("place", ["in a CPU's work", "launching", "waiting"])
def test_an_interrupted_step_can_be_abandoned(steps, place, monkeypatch):
    """As when somebody presses Ctrl-C in the middle of it. Keys and values that were never written are not served."""
    settings = {"max_num_seqs": 3, "max_num_batched_tokens": 16}
    if place == "in a CPU's work":
        engine, pool = make_engine(max_steps_in_flight=steps, model=InterruptedModel(4), **settings)
    elif place == "launching":
        engine, pool = make_overlapped(PromptLane(), steps, model=InterruptedModel(4), **settings)
    else:
        engine, pool = make_overlapped(LateLane(), steps, **settings)
        interrupt_second_wait(monkeypatch)
    unlucky = [make_request(30 + i, [i, 2] * 7, 9, frequency_penalty=0.5) for i in range(7)]
    with pytest.raises(KeyboardInterrupt):
        run(engine, unlucky)
    monkeypatch.undo()
    engine.abandon()
    assert not engine.has_unfinished
    assert pool.num_free_blocks == pool.num_blocks
    requests = [*unlucky, *random_requests(6)]
    assert answers(run(engine, requests)) == answers(run(make_engine(max_num_seqs=32)[0], requests))


def interrupt_second_wait(monkeypatch) -> None:
    calls, finish = [], InFlightStep.finish

    def interrupted(self):
        calls.append(self)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return finish(self)

    monkeypatch.setattr(InFlightStep, "finish", interrupted)


def test_unstarted_rows_are_dropped_and_started_ones_finish():
    """What a deadline does while steps are in flight."""
    engine, pool = make_overlapped(LateLane(), 2, max_num_seqs=4)
    requests = start_some(engine)
    started = [r.id.row for r in requests if engine._completions[r.id].sequence.first_scheduled_time is not None]
    engine.drop_unstarted()
    results = run(engine, [])
    assert sorted(request_id.row for request_id in results) == started == [0, 1, 2, 3]
    for row in started:
        assert results[requests[row].id].token_ids == naive_greedy([row, 7, 9], 20)
    assert pool.num_free_blocks == pool.num_blocks


class ScarceModel(StandInModel):
    """Has memory for a few tokens at once."""

    def __init__(self, block_size: int, most_tokens: int) -> None:
        super().__init__(block_size)
        self.most_tokens = most_tokens
        self.num_refused = 0

    def forward(self, batch, cache, prompt_lens):
        if len(batch.token_ids) > self.most_tokens:
            self.num_refused += 1
            raise torch.OutOfMemoryError("no memory for the activations")
        return super().forward(batch, cache, prompt_lens)


@pytest.mark.parametrize(("steps", "most_tokens"), [(2, 1), (2, 20), (3, 5)])
def test_a_step_without_memory_is_cut_while_others_are_in_flight(steps, most_tokens):
    model = ScarceModel(4, most_tokens)
    requests = random_requests(8)
    engine, _ = make_overlapped(PromptLane(), steps, model=model)
    assert answers(run(engine, requests)) == answers(run(make_engine(max_num_seqs=32)[0], requests))
    assert 0 < model.num_refused <= 6


def test_halves_of_a_step_may_use_one_graph_after_the_other():
    """Sampling that waits for penalties must not find the second half's hidden states."""
    model = ScarceModel(4, 6)
    model.most_tokens = 100  # while graphs are captured
    engine, _ = make_overlapped(PromptLane(), 2, model=model, capture=FakeCapture())
    model.most_tokens = 6
    requests = [make_request(i, [i] * 4, 20, frequency_penalty=0.9, logprobs=1) for i in range(8)]
    assert answers(run(engine, requests)) == answers(run(make_engine()[0], requests))
    assert model.num_refused > 0


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried"), "out of memory in a step of .* sequences"),
        (torch.AcceleratorError("CUDA error: an illegal memory access"), "the device failed in a step of 4 tokens"),
    ],
)
@pytest.mark.parametrize("lane_class", [LateLane, PromptLane])
def test_faults_that_show_late_end_the_job_in_one_line(fault, message, lane_class):
    class Failing(StandInModel):
        num_passes = 0

        def forward(self, batch, cache, prompt_lens):
            self.num_passes += 1
            if self.num_passes > 3:
                raise fault
            return super().forward(batch, cache, prompt_lens)

    engine, _ = make_overlapped(lane_class(), 2, model=Failing(4))
    with pytest.raises(BatchInferError, match=message) as caught:
        run(engine, [make_request(i, [1, 2, 3], 9, temperature=0.0) for i in range(4)])
    assert "\n" not in str(caught.value)


def test_a_token_of_a_row_whose_numbers_broke_never_leaves_the_vocabulary(monkeypatch):
    """Its next step is in flight when that shows; a wild id would read beyond the embedding, and penalties would write
    beyond the logits."""
    greedy, sample = sampling.greedy, sampling.sample
    seen: list[int] = []

    def wild(token_ids, is_finite):
        return torch.where(is_finite, token_ids, 2**31 - 1), is_finite

    def watched_sample(logits, *parameters):
        seen.append(int(parameters[-1].penalties.tokens.token_ids.max()))
        return wild(*sample(logits, *parameters))

    class Watching(StandInModel):
        def forward(self, batch, cache, prompt_lens):
            seen.append(int(batch.token_ids.max()))
            return super().forward(batch, cache, prompt_lens)

    monkeypatch.setattr("batchinfer.kernels.sampling.greedy", lambda logits: wild(*greedy(logits)))
    monkeypatch.setattr("batchinfer.kernels.sampling.sample", watched_sample)
    for penalty in (0.0, 1e-30):
        engine, _ = make_overlapped(LateLane(), 2, model=Watching(4, POISON))
        prompts = ([1, POISON, 2], [1, 2])
        rows = [make_request(i, prompt, 9, frequency_penalty=penalty) for i, prompt in enumerate(prompts)]
        results = run(engine, rows)
        assert results[rows[0].id].error_code is ErrorCode.NUMERICAL
        assert results[rows[1].id].token_ids == naive_greedy([1, 2], 9)
        assert max(seen) < VOCAB


def test_prompt_scores_after_a_gap_are_not_believed():
    """Numbers broke in the first chunk of a prompt; the second was under way, and both come again."""
    scores = PromptScores(6)
    scores.add(2, np.array([9, 9, 9], np.float32))
    scores.add(0, np.array([1, 2], np.float32))
    scores.add(0, np.array([8, 8, 3], np.float32))
    scores.add(3, np.array([4, 5], np.float32))
    assert scores.result().per_token.tolist() == [1, 2, 3, 4, 5]


def test_sizes_and_widths_of_graphs():
    for most in (1, 2, 7, 64, 100, 256, 1000):
        sizes = graph_sizes(most)
        assert list(sizes) == sorted(set(sizes))
        assert sizes[-1] == most
        for rows in range(1, most + 1):
            size = next(size for size in sizes if size >= rows)
            assert size - rows < (size / 2 if rows < 65 else size / 5)
    assert len(graph_sizes(256)) < 20
    assert graph_widths(512, 16, cost_grows=False) == (128, 512)
    assert graph_widths(8192, 16, cost_grows=False) == (128, 512, 8192)
    assert graph_widths(8192, 16, cost_grows=True) == (128, 512, 2048, 8192)
    assert graph_widths(512, 16, cost_grows=True) == (128, 512)
    assert graph_widths(100, 16, cost_grows=True) == (100,)


def test_arrays_of_all_kinds_arrive_as_they_were():
    lane = LateLane()
    queue = StagedQueue(lane)
    rng = np.random.default_rng(0)
    kinds = (np.int64, np.int32, np.float32, np.bool_)
    arrays = [rng.integers(0, 2, (n, 3)).astype(kinds[i % 4]) for i, n in enumerate((1, 7, 0, 500, 9000, 20_000, 3))]
    arrays.append(np.arange(60).reshape(6, 10)[::2, 1:4])  # strided
    tensors = [queue.upload(array) for array in arrays]
    assert all(tensor.data_ptr() % 64 == 0 for tensor in tensors)
    copies = [array.copy() for array in arrays]
    for array in arrays:
        array[:] = 0  # the host goes on
    fetch = queue.launch(lambda: [*tensors, tensors[3] + 1])
    assert lane.num_waits == 0
    *found, last = fetch.result()
    for array, copy in zip(found, copies, strict=False):
        assert array.dtype == copy.dtype
        np.testing.assert_array_equal(array, copy)
    np.testing.assert_array_equal(last, copies[3] + 1)
