"""Progress: when it speaks, what it says, and how much of the job it takes for done."""

import io

import pytest

from batchinfer.progress import Progress, ProgressFigures, WorkProgress, share_done


def figures(rows_done: int, **changes) -> ProgressFigures:
    values = {
        "rows_done": rows_done,
        "rows_done_here": rows_done,
        "errors": 0,
        "tokens_of_rows_done": rows_done * 100,
        "tokens_computed": rows_done * 100,
        "output_tokens": rows_done * 60,
    }
    return ProgressFigures(**{**values, **changes})


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("now", "share"),
    [
        (figures(0), None),
        (figures(0, tokens_computed=900), None),
        (figures(25), 0.25),
        (figures(25, tokens_computed=5000), 0.5),  # 2,500 tokens done, 2,500 of rows that run, of 10,000
        (figures(75, rows_done_here=25, tokens_of_rows_done=2500, tokens_computed=2500), 0.5),  # 50 rows resumed
        (figures(90, tokens_computed=20_000), 0.999),
        (figures(100), 1.0),
        (figures(100, rows_done_here=0, tokens_of_rows_done=0), 1.0),
        (figures(25, tokens_of_rows_done=0), None),  # only error rows yet
    ],
)
def test_share_done_is_weighted_by_tokens(now, share):
    assert share_done(now, 100) == (None if share is None else pytest.approx(share))


def test_without_a_terminal_a_plain_line_every_30_seconds():
    stream, clock = io.StringIO(), Clock()
    progress = Progress(100, stream=stream, clock=clock)
    for clock.now in (1.0, 29.0, 30.0, 31.0, 59.0, 60.5):
        progress.update(figures(int(clock.now), errors=2))
    lines = stream.getvalue().splitlines()
    assert len(lines) == 2
    # 30 rows of 60 output tokens in 30 s; 70% are left at 1% a second
    assert lines[0] == "batchinfer: 30%, 30/100 rows, 60 output tokens/s, 2 errors, 1m 10s left"


def test_before_the_first_row_nothing_is_claimed():
    stream, clock = io.StringIO(), Clock()
    progress = Progress(100, stream=stream, clock=clock)
    clock.now = 31.0
    progress.update(figures(0, output_tokens=310))
    assert stream.getvalue() == "batchinfer: 0/100 rows, 10 output tokens/s, 0 errors, ? left\n"


def test_the_end_is_always_shown():
    stream = io.StringIO()
    Progress(100, stream=stream, clock=Clock()).close(figures(100))
    assert stream.getvalue().startswith("batchinfer: 100%, 100/100 rows")


def test_all_is_said_to_be_done_only_at_the_end():
    stream, clock = io.StringIO(), Clock()
    progress = Progress(100, stream=stream, clock=clock)
    clock.now = 30.0
    progress.update(figures(90, tokens_computed=20_000))
    assert stream.getvalue().startswith("batchinfer: 99%, 90/100 rows")


def test_on_a_terminal_a_bar():
    stream, clock = Terminal(), Clock()
    progress = Progress(100, stream=stream, clock=clock)
    clock.now = 10.0
    progress.update(figures(40, errors=1))
    progress.close(figures(100))
    shown = stream.getvalue()
    assert " 40%|" in shown
    assert "40/100 rows, 240 output tokens/s, 1 error [" in shown
    assert "100%|" in shown
    assert shown.endswith("\n")


def test_the_last_line_says_how_long_it_took():
    stream, clock = io.StringIO(), Clock()
    progress = Progress(100, stream=stream, clock=clock)
    clock.now += 75
    progress.close(figures(rows_done=100, rows_done_here=100))
    assert stream.getvalue().endswith(" errors, done in 1m 15s\n")


def test_work_of_a_known_amount():
    stream, clock = io.StringIO(), Clock()
    progress = WorkProgress(8000, "tokens", stream=stream, clock=clock)
    for clock.now in (10.0, 20.0, 40.0):
        progress.add(1000)
    clock.now = 50.0
    progress.add(5000)
    progress.close()
    assert stream.getvalue().splitlines() == [
        "batchinfer: 38%, 3,000/8,000 tokens, 75 tokens/s, 1m 07s left",  # 5,000 tokens at 75 a second
        "batchinfer: 100%, 8,000/8,000 tokens, 160 tokens/s, done in 50.0 s",
    ]
