"""Windows of texts, at the lengths where something changes."""

import numpy as np
import pytest

from batchinfer.evaluation.windows import WindowRules, cut


@pytest.mark.parametrize(
    ("length", "targets"),
    [
        *((0, []), (1, []), (2, []), (15, []), (16, [])),  # fewer than 16 inputs
        *((17, [16]), (18, [17]), (512, [511]), (513, [512])),
        *((514, [512]), (528, [512])),  # one target, then 15 targets of a second window are too few
        (529, [512, 16]),
        (1025, [512, 512]),
        (1026, [512, 512]),
        (1041, [512, 512, 16]),
    ],
)
def test_lengths(length, targets):
    ids = np.arange(length, dtype=np.int32)
    windows = list(cut([ids], WindowRules()))
    assert [len(window) - 1 for window in windows] == targets
    for number, window in enumerate(windows):  # a window's inputs begin with the last target of the one before
        assert window.tolist() == list(range(512 * number, 512 * number + targets[number] + 1))


def test_each_text_alone():
    texts = [np.full(length, length, np.int32) for length in (20, 3, 9)]
    windows = list(cut(texts, WindowRules(window=8, min_inputs=2)))
    assert [(len(window), set(window.tolist())) for window in windows] == [
        *((9, {20}), (9, {20}), (4, {20})),
        (3, {3}),
        (9, {9}),
    ]


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ({"window": 0}, "window = 0: must be 1 or more"),
        ({"min_inputs": 0}, r"min_inputs = 0: must be from 1 to the window \(512\)"),
        ({"window": 8}, r"min_inputs = 16: must be from 1 to the window \(8\)"),
    ],
)
def test_broken_rules_are_named(rules, message):
    with pytest.raises(ValueError, match=message):
        WindowRules(**rules)
