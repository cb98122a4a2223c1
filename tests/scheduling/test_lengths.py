"""What is known of answers' lengths, against plain counts and distributions of a known form."""

import random

import numpy as np
import pytest

from batchinfer.request import Request, RequestId, SamplingParams
from batchinfer.scheduling.lengths import OutputLengths

NONE = np.zeros(0, np.int64)


def request(max_tokens: int, prompt: int = 10, group: str | None = None, **params: object) -> Request:
    sampling = SamplingParams(max_tokens=max_tokens, **params)  # type: ignore[arg-type]
    return Request(RequestId(0, 0), np.ones(prompt, np.int32), sampling, max_tokens, 0, length_group=group)


def taught(draws: list[int], max_tokens: int, prompt: int = 10) -> tuple[OutputLengths, int]:
    lengths = OutputLengths()
    length_class = lengths.class_of(request(max_tokens, prompt))
    for draw in draws:
        lengths.add(length_class, min(draw, max_tokens), is_cut=draw >= max_tokens)
    lengths.update(NONE, NONE)
    return lengths, length_class


def test_what_only_max_tokens_ends_is_known_exactly() -> None:
    lengths = OutputLengths()
    exact = lengths.class_of(request(700, ignore_eos=True))
    stops = lengths.class_of(request(700, ignore_eos=True, stop=("x",)))
    assert exact != stops
    for _ in range(50):
        lengths.add(exact, 3, is_cut=False)  # changes nothing, and teaches nothing
    lengths.update(NONE, NONE)
    assert lengths.num_ended == 0
    assert lengths.expected([request(700, ignore_eos=True), request(9, ignore_eos=True)]).tolist() == [700, 9]
    classes, done = np.array([exact] * 3), np.array([0, 699, 700])
    assert lengths.remaining(classes, done, np.array([700] * 3), np.array([0.01, 0.5, 0.99])).tolist() == [700, 1, 0]


def test_at_first_answers_are_expected_to_be_nearly_as_long_as_allowed() -> None:
    lengths = OutputLengths()
    for max_tokens in (1, 10, 100, 500):
        expected = lengths.expected([request(max_tokens)])[0]
        assert 0.93 * max_tokens < expected <= max_tokens


@pytest.mark.parametrize("seed", range(10))
def test_geometric_lengths_are_learnt(seed: int) -> None:
    """Their mean is 1 / p, the length that a share u exceeds is log(u) / log(1 - p), and neither depends on what has
    been generated already."""
    rng = random.Random(seed)
    draws = [1 + int(np.log(1 - rng.random()) / np.log(1 - 1 / 80)) for _ in range(2000)]
    lengths, length_class = taught(draws, 2000)
    assert lengths.expected([request(2000)])[0] == pytest.approx(80, rel=0.1)
    levels = np.array([0.9, 0.5, 0.1, 0.5])
    done = np.array([0, 0, 0, 60])
    remaining = lengths.remaining(np.full(4, length_class), done, np.full(4, 2000), levels)
    np.testing.assert_allclose(remaining, np.log(levels) / np.log(1 - 1 / 80), rtol=0.15, atol=2)


@pytest.mark.parametrize("seed", range(10))
def test_early_endings_do_not_mislead(seed: int) -> None:
    """Half the answers have 10 tokens and half 200; when only the short ones have ended, the long ones still run."""
    rng = random.Random(seed)
    num_short = rng.randrange(80, 120)
    lengths, length_class = taught([10] * num_short, 1000)
    assert lengths.expected([request(1000)])[0] < 60  # all that is known has ended
    lengths.update(np.full(100, length_class), np.full(100, 150))
    share = 100 / (100 + num_short)
    assert lengths.expected([request(1000)])[0] > share * 150
    remaining = lengths.remaining(np.full(2, length_class), np.array([150, 0]), np.full(2, 1000), np.array([0.5, 0.7]))
    assert remaining[0] > 100
    assert remaining[1] < 20  # a share of 0.7 is above that of the long ones


def test_answers_that_are_cut_count_as_going_on() -> None:
    lengths, length_class = taught([100] * 50, 100)
    assert lengths.expected([request(100)])[0] > 99
    other = request(4000)  # another class leans on what all show: none of 50 ended within 100 tokens
    assert lengths.class_of(other) != length_class
    assert (
        lengths.remaining(np.array([lengths.class_of(other)]), np.array([0]), np.array([4000]), np.array([0.95]))[0]
        > 100
    )


def test_classes_differ_by_prompt_and_limit_and_lean_on_all() -> None:
    lengths, _ = taught([20] * 40, 900, prompt=10)
    long_prompt = request(900, prompt=500)
    assert lengths.expected([long_prompt])[0] < 90  # without them it would be about 800
    for _ in range(40):
        lengths.add(lengths.class_of(long_prompt), 300, is_cut=False)
    lengths.update(NONE, NONE)
    short, long = lengths.expected([request(900), long_prompt])
    assert short < 40
    assert long > 200


def test_the_number_of_classes_is_bounded() -> None:
    lengths = OutputLengths()
    classes = {lengths.class_of(request(2**limit, 2**prompt)) for limit in range(12) for prompt in range(12)}
    assert max(classes) == 65  # 0 is of exact lengths, 1 of rows without a value
    assert lengths.expected([request(2**11, 2**11)])[0] > 0


def test_staleness_follows_the_number_of_endings() -> None:
    lengths, length_class = taught([5] * 3, 10)
    assert not lengths.is_stale
    for _ in range(4):
        lengths.add(length_class, 5, is_cut=False)
    assert lengths.is_stale
    lengths.update(NONE, NONE)
    assert not lengths.is_stale


def test_what_an_earlier_run_tells_goes_before_what_has_been_learnt() -> None:
    lengths, length_class = taught([20] * 40, 900)
    told = Request(RequestId(0, 0), np.ones(10, np.int32), SamplingParams(max_tokens=900), 900, 0, expected_tokens=333)
    learnt, by_earlier_run = lengths.expected([request(900), told])
    assert learnt < 40
    assert by_earlier_run == 333
    assert not lengths.trusts_earlier_runs
    for number in range(20):
        lengths.add(length_class, 7, is_cut=False, expected_tokens=7 if number else 8)
    assert lengths.trusts_earlier_runs  # 19 of 20
    for _ in range(3):
        lengths.add(length_class, 7, is_cut=False, expected_tokens=8)
    assert not lengths.trusts_earlier_runs


def test_an_earlier_run_is_believed_until_answers_run_on_beyond_it() -> None:
    """Two may, and of many a tenth: of those that have ended and of those that run."""
    lengths, length_class = taught([20] * 40, 900)
    assert lengths.believes_earlier_runs(2)
    assert not lengths.believes_earlier_runs(3)
    for number in range(30):
        lengths.add(length_class, 7, is_cut=False, expected_tokens=7 if number else 6)
    assert lengths.believes_earlier_runs(4)  # 5 of 34
    assert not lengths.believes_earlier_runs(5)  # 6 of 35


@pytest.mark.parametrize("seed", range(10))
def test_curves_are_those_of_a_plain_life_table(seed: int) -> None:
    """Whatever is handed over one by one or together, and whichever of the answers still run."""
    rng = random.Random(seed)
    one_by_one, together = OutputLengths(), OutputLengths()
    asked = [request(rng.choice([100, 900]), rng.choice([5, 70])) for _ in range(60)]
    for lengths in (one_by_one, together):
        for each in asked:
            lengths.class_of(each)
    for each in asked:
        length, is_cut = rng.randrange(1, each.max_tokens), rng.random() < 0.3
        for lengths in (one_by_one, together):
            lengths.add(lengths.class_of(each), length, is_cut)
        one_by_one.update(NONE, NONE)
    running = np.array([one_by_one.class_of(each) for each in asked]), np.arange(60)
    one_by_one.update(*running)
    together.update(*running)
    np.testing.assert_allclose(one_by_one.expected(asked), together.expected(asked))


def test_groups_are_learnt_apart_whatever_their_prompts() -> None:
    """200 answers each of 10 and of 300 tokens in the mean, beside 4 as all are."""
    lengths = OutputLengths()
    for draw in (8, 9, 10, 11, 12) * 40:
        for group, factor, prompt in (("brief", 1, 5), ("long", 30, 900)):
            lengths.add(lengths.class_of(request(1000, prompt, group)), factor * draw, is_cut=False)
    lengths.update(NONE, NONE)
    asked = [request(1000, 900, "brief"), request(1000, 5, "long"), request(500, 5, "long")]
    brief, long, limited = lengths.expected(asked).tolist()
    assert brief == pytest.approx((200 * 10 + 4 * 155) / 204, rel=0.1)
    assert [long, limited] == [pytest.approx((200 * 300 + 4 * 155) / 204, rel=0.1)] * 2
    assert lengths.class_of(request(1000, group="brief", ignore_eos=True)) == lengths.class_of(
        request(7, ignore_eos=True)
    )


def test_groups_beyond_the_most_are_one() -> None:
    lengths = OutputLengths()
    classes = [lengths.class_of(request(100, group=f"task {i}")) for i in range(100)]
    assert len(set(classes[:63])) == 63
    assert len(set(classes[63:])) == 1
    assert classes[63] not in classes[:63]
    assert [lengths.class_of(request(100, group=f"task {i}")) for i in range(100)] == classes


def test_rows_without_a_value_are_one_class_beside_the_most() -> None:
    lengths = OutputLengths()
    without = [lengths.class_of(request(limit, prompt, group="")) for limit in (9, 900) for prompt in (3, 300)]
    classes = [lengths.class_of(request(100, group=f"task {i}")) for i in range(64)]
    assert len(set(without)) == 1
    assert len({without[0], *classes}) == 65
    for _ in range(200):
        lengths.add(without[0], 300, is_cut=False)
        lengths.add(classes[0], 10, is_cut=False)
    lengths.update(NONE, NONE)
    expected = lengths.expected([request(1000, 7, group=""), request(1000, 7, group="task 0")]).tolist()
    assert expected == [pytest.approx((200 * mean + 4 * 155) / 204, rel=0.1) for mean in (300, 10)]


def test_what_groups_beyond_the_most_show_is_learnt_together() -> None:
    lengths = OutputLengths()
    for i in range(200):
        lengths.add(lengths.class_of(request(1000, group=f"task {i}")), 4 if i < 63 else 200, is_cut=False)
    lengths.update(NONE, NONE)
    of_all = (63 * 4 + 137 * 200) / 200
    beyond = (137 * 200 + 4 * of_all) / 141
    expected = lengths.expected([request(1000, group=name) for name in ("task 150", "never seen")]).tolist()
    assert expected == [pytest.approx(beyond, rel=0.1)] * 2
