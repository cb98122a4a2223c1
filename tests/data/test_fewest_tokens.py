"""fewest_tokens: what rows hold at least, from their first ones."""

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchinfer.config import InputConfig
from batchinfer.data import fewest_tokens as module
from batchinfer.data.job_input import JobInput
from batchinfer.request import SamplingParams


def job(tmp_path, columns, **options) -> JobInput:
    pq.write_table(pa.table(columns), tmp_path / "rows.parquet")
    config = InputConfig(input=(str(tmp_path / "rows.parquet"),), **options)
    return JobInput.read(config, 0, lambda line: None)


def fewest_tokens(
    rows: JobInput, params: SamplingParams, block_size: int | None = None, longest: int = 10_000
) -> float:
    return module.fewest_tokens(rows, params, longest, block_size)


UNTIL_THE_END = SamplingParams(max_tokens=128, ignore_eos=True)


def test_texts_by_their_characters(tmp_path):
    rows = job(tmp_path, {"prompt": ["x" * 100, "x" * 50]})
    assert fewest_tokens(rows, UNTIL_THE_END) == (100 + 50) / 4 / 2 + 128


def test_texts_of_short_words_by_their_pieces(tmp_path):
    pieces = ["<|im_start|>", "It", " is", " ", "42", ":", " a", " b", "...", "\n", " c", "_", "d"]
    rows = job(tmp_path, {"prompt": ["".join(pieces)]})
    assert fewest_tokens(rows, UNTIL_THE_END) == len(pieces) + 128


@pytest.mark.parametrize(
    ("params", "answer"),
    [
        (SamplingParams(max_tokens=128), 64),
        (SamplingParams(max_tokens=10), 10),
        (SamplingParams(), 64),
        (SamplingParams(max_tokens=128, ignore_eos=True, stop=("x",)), 64),
        (SamplingParams(max_tokens=0), 0),
    ],
)
def test_answers_that_may_end_count_little(tmp_path, params, answer):
    assert fewest_tokens(job(tmp_path, {"prompt": ["x" * 100]}), params) == 25 + answer


def test_a_rows_own_limit_counts(tmp_path):
    rows = job(tmp_path, {"prompt": ["x" * 100, "x" * 100], "max_tokens": [4, None]})
    assert fewest_tokens(rows, UNTIL_THE_END) == 25 + (4 + 128) / 2


def test_token_ids_count_one_each(tmp_path):
    assert fewest_tokens(job(tmp_path, {"prompt_token_ids": [[1] * 30, [2] * 10]}), UNTIL_THE_END) == 20 + 128


def test_chats_count_their_texts(tmp_path):
    chat = [{"role": "user", "content": "x" * 200}]  # and the role's four characters, a token
    assert fewest_tokens(job(tmp_path, {"messages": [chat]}), UNTIL_THE_END) == 50 + 1 + 128


def test_a_template_counts_its_columns(tmp_path):
    rows = job(tmp_path, {"a": ["x" * 50], "b": ["x" * 30], "c": ["x" * 999]}, template="{{ a }} {{ b }}")
    assert fewest_tokens(rows, UNTIL_THE_END) == (50 + 30) // 4 + 128


def test_rows_that_cannot_be_answered_do_not_count(tmp_path):
    rows = job(tmp_path, {"prompt": ["x" * 100, "x" * 500], "max_tokens": [4, -1]})
    assert fewest_tokens(rows, UNTIL_THE_END) == 25 + 4


def test_a_prompt_that_leaves_no_room_holds_nothing_and_an_answer_what_there_is(tmp_path):
    rows = job(tmp_path, {"prompt": ["x" * 4000, "x" * 400, "y" * 40]})
    assert fewest_tokens(rows, UNTIL_THE_END, longest=1000) == (0 + (100 + 128) + (10 + 128)) / 3
    assert fewest_tokens(rows, UNTIL_THE_END, longest=200) == (0 + 200 + (10 + 128)) / 3


def test_only_the_first_rows_are_read(tmp_path):
    rows = job(tmp_path, {"prompt": ["x" * 100] * 64 + ["x" * 9999]})
    assert fewest_tokens(rows, UNTIL_THE_END) == 25 + 128


def test_beginnings_that_rows_have_in_common_do_not_count(tmp_path):
    """Two rows of each of two beginnings, of 41 and 21 characters with what follows them alike; and one alone."""
    prompts = ["a" * 40 + "x1" + "y" * 38, "a" * 40 + "x2" + "y" * 38, "b" * 20 + "x3", "b" * 20 + "x4", "c" * 80]
    rows = job(tmp_path, {"prompt": prompts})
    whole = (80 + 80 + 22 + 22 + 80) / 4 / 5 + 128
    assert fewest_tokens(rows, UNTIL_THE_END) == pytest.approx(whole)
    # 10.25 and 5.25 tokens, of which half a block is in doubt.
    assert fewest_tokens(rows, UNTIL_THE_END, block_size=1) == pytest.approx(whole - (9 + 9 + 4 + 4) / 5)
    assert fewest_tokens(rows, UNTIL_THE_END, block_size=5) == pytest.approx(whole - (5 + 5) / 5)


@pytest.mark.parametrize("beginning", ["A word, and more. " * 220, "12345,678," * 400, "x = f(a[i], b) + {}\n" * 200])
def test_rows_that_differ_in_their_end_alone_hold_little_each(tmp_path, beginning):
    rows = job(tmp_path, {"prompt": [f"{beginning}{i}" for i in range(64)]})
    assert 0 <= fewest_tokens(rows, UNTIL_THE_END, block_size=16) - 128 < 32


def test_token_ids_in_common_do_not_count(tmp_path):
    rows = job(tmp_path, {"prompt_token_ids": [[1, 2, 3, 4, 5], [9], [1, 2, 3, 7]]})
    assert fewest_tokens(rows, UNTIL_THE_END, block_size=2) == (5 - 2 + 1 + 4 - 2) / 3 + 128


def test_chats_in_common_do_not_count(tmp_path):
    chats = [[{"role": "system", "content": "x" * 200}, {"role": "user", "content": name * 40}] for name in "ab"]
    rows = job(tmp_path, {"messages": chats})
    texts = len("system" + "x" * 200 + "user")  # 52.5 tokens: two whole blocks and more than half of one
    assert fewest_tokens(rows, UNTIL_THE_END, block_size=16) == (texts + 40) / 4 - 32 + 128
