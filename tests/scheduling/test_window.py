"""The window of rows between reader and engine."""

import random
from collections.abc import Sequence

import numpy as np
import pytest

from batchinfer.config import SchedulerConfig
from batchinfer.request import Request, RequestId, SamplingParams
from batchinfer.scheduling import window as window_module
from batchinfer.scheduling.window import Window


def request(row: int, prompt: Sequence[int], sample: int = 0, max_tokens: int = 10) -> Request:
    params = SamplingParams(max_tokens=max_tokens)
    return Request(RequestId(0, row, sample), np.array(prompt, np.int32), params, max_tokens, 0)


def make_window(**options: object) -> Window:
    config = SchedulerConfig(**{"max_num_seqs": 4} | options)  # type: ignore[arg-type]
    return Window(config, 4, lambda requests: np.array([r.max_tokens for r in requests], np.float64))


def take_all(window: Window) -> list[int]:
    return [window.take()[0][0].id.row for _ in range(len(window))]


def test_input_order_is_kept_and_a_batch_is_enough() -> None:
    for options in ({"order": "input"}, {"batching": "static"}):
        window = make_window(**options)
        window.add([request(row, [row % 2] * 8, max_tokens=10 + row) for row in range(3)])
        assert not window.is_full
        window.add([request(3, [0] * 8)])
        assert window.is_full
        window.look(0)
        assert take_all(window) == [0, 1, 2, 3]
        assert not window.is_full


def test_groups_continue_with_rows_that_come_later() -> None:
    """Two rows of each group are there at first; the one that runs goes on before the other begins."""
    window = make_window()
    window.add([request(row, [row % 2] * 8 + [row]) for row in range(4)])
    window.look(0)
    taken = [window.take()[0][0].id.row]
    window.add([request(row, [row % 2] * 8 + [row]) for row in range(4, 12)])
    window.look(0)
    taken += take_all(window)
    groups = [row % 2 for row in taken]
    assert sorted(taken) == list(range(12))
    assert groups == [0] * 6 + [1] * 6


def test_tokens_to_compute_leave_out_what_the_row_before_shares() -> None:
    window = make_window()
    window.add([request(0, [1] * 8 + [2]), request(1, [1] * 8 + [3, 3]), request(2, [1] * 8)])
    tokens = {}
    for _ in range(3):
        row, count = window.take()
        tokens[row[0].id.row] = count
    # Blocks of 4 tokens; the last token of a prompt is always computed. The first of the three shares nothing.
    first = max(tokens.values())
    assert first in (8, 9, 10)
    shared = {0: 9 - 8, 1: 10 - 8, 2: 8 - 4}
    assert sum(tokens[row] != shared[row] for row in range(3)) == 1


def test_samples_of_a_row_stay_together_in_order() -> None:
    window = make_window()
    window.add([request(row, [row], sample, max_tokens=10 + row) for row in range(5) for sample in range(3)])
    window.look(0)
    ids = [r.id for _ in range(len(window)) for r in window.take()[0]]
    assert sorted(ids) == [RequestId(0, row, sample) for row in range(5) for sample in range(3)]
    assert [i.sample for i in ids] == [0, 1, 2] * 5
    assert all(ids[i].row == ids[i + 1].row == ids[i + 2].row for i in range(0, 15, 3))


def test_the_window_is_bounded_by_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(window_module, "WINDOW_BYTES", 10_000)
    window = make_window()
    while not window.is_full:
        window.add([request(len(window), [1] * 244)])  # 976 bytes, and 1,024 of what holds them
    assert len(window) == 5
    window.take()
    assert not window.is_full


@pytest.mark.parametrize("seed", range(10))
def test_each_row_leaves_once_and_sorting_costs_little(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows come and go at random; those sorted, again and again, are few times as many as there are."""
    rng = random.Random(seed)
    sorted_rows = []
    order = window_module.packed_order

    def counted(prompts: Sequence[np.ndarray], *arguments: object) -> np.ndarray:
        sorted_rows.append(len(prompts))
        return order(prompts, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(window_module, "packed_order", counted)
    window, taken, row = make_window(), [], 0
    while row < 600 or len(window):
        for _ in range(rng.randrange(40) if row < 600 else 0):
            window.add([request(row, [rng.randrange(3)] * 5 + [row], max_tokens=rng.randrange(1, 9))])
            row += 1
        window.look(len(taken))
        for _ in range(min(len(window), rng.randrange(10))):
            taken.append(window.take()[0][0].id.row)
    assert sorted(taken) == list(range(row))
    assert sum(sorted_rows) < 12 * row


def test_new_knowledge_of_lengths_changes_the_order() -> None:
    lengths = {0: 10.0, 1: 10.0, 2: 10.0}
    window = Window(SchedulerConfig(), 4, lambda requests: np.array([lengths[r.id.row] for r in requests]))
    window.add([request(row, [row]) for row in range(3)])
    window.look(0)
    lengths[2] = 30.0
    window.look(63)
    window.look(64)
    assert take_all(window) == [2, 0, 1]
