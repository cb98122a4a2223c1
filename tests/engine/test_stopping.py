"""Where completions end and what their text is, against cuts worked out by hand."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from stand_in import PieceTokenizer, make_engine, make_request, naive_greedy, run

from batchinfer.engine.stopping import Stop, StopChecker, StopStrings

PIECES = {
    1: b"a,b",
    2: b",c",
    3: b"d",
    4: "é".encode()[:1],
    5: "é".encode()[1:],
    6: b"",  # the end of sequence, say
    7: b"END",
    8: b"E",
    9: b"ND",
    10: "日本".encode()[:4],
}
TOKENIZER = PieceTokenizer(PIECES, special=frozenset({6}))


def complete(tokens: list[int], eos: frozenset[int] = frozenset({6}), max_tokens: int = 100, **params):
    """Feeds tokens until the completion ends: (stop, text, number of tokens taken)."""
    checker = StopChecker(make_request(0, [30], max_tokens, **params), eos, TOKENIZER)
    for count in range(1, len(tokens) + 1):
        stop = checker.check(tokens[:count])
        if stop is not None:
            return stop, checker.text(tokens[:count], stop), count
    raise AssertionError("did not end")


@pytest.mark.parametrize(
    ("tokens", "params", "reason", "stop_reason", "text", "count"),
    [
        # across token boundaries: cut at the match's first character; every token counts
        ([1, 2, 3], {"stop": ("b,c",)}, "stop", "b,c", "a,", 2),
        ([1, 2, 3], {"stop": ("b,c",), "include_stop_str_in_output": True}, "stop", "b,c", "a,b,c", 2),
        ([1, 2, 3], {"stop": ("zzz", ",")}, "stop", ",", "a", 1),
        # at the end of the text: max_tokens is reached with the token that completes the string
        ([1, 2], {"stop": ("c",), "max_tokens": 2}, "stop", "c", "a,b,", 2),
        ([1, 2], {"stop": ("x",), "max_tokens": 2}, "length", None, "a,b,c", 2),
        # the whole text is the match
        ([7], {"stop": ("END",)}, "stop", "END", "", 1),
        ([8, 9], {"stop": ("END",)}, "stop", "END", "", 2),
        # of several the one completed first counts, then the longest
        ([1, 2], {"stop": (",b", "a,b")}, "stop", "a,b", "", 1),
        ([1, 2], {"stop": ("b,c", ",b,c", "a,b,c", ",c")}, "stop", "a,b,c", "", 2),
        ([1, 2, 3], {"stop": ("b,cd", ",c")}, "stop", ",c", "a,b", 2),
        # a character made of two tokens, and one cut off by the end
        ([3, 4, 5, 3], {"stop": ("é",)}, "stop", "é", "d", 3),
        ([3, 10], {"stop": ("\ufffd",), "max_tokens": 2}, "stop", "\ufffd", "d日", 2),
        ([3, 10], {"stop": ("x",), "max_tokens": 2}, "length", None, "d日\ufffd", 2),
        ([3, 10], {"max_tokens": 2}, "length", None, "d日\ufffd", 2),
        # end of sequence and stop ids
        ([3, 6], {}, "stop", None, "d", 2),
        ([3, 6], {"stop": ("x",)}, "stop", None, "d", 2),
        ([3, 6, 3], {"ignore_eos": True, "max_tokens": 3}, "length", None, "dd", 3),
        ([3, 1], {"stop_token_ids": (1,)}, "stop", "1", "d", 2),
        ([3, 1], {"stop_token_ids": (1,), "stop": ("x",)}, "stop", "1", "d", 2),
        ([3, 1], {"stop_token_ids": (1,), "include_stop_str_in_output": True}, "stop", "1", "da,b", 2),
        ([3, 6], {"stop_token_ids": (6,), "ignore_eos": True}, "stop", "6", "d", 2),
        ([3, 4, 1], {"stop_token_ids": (1,), "stop": ("x",)}, "stop", "1", "d\ufffd", 3),
        # min_tokens: what is complete by then does not count, what is completed later does
        ([7, 3, 7], {"stop": ("END",), "min_tokens": 1}, "stop", "END", "ENDd", 3),
        ([8, 9, 3], {"stop": ("END",), "min_tokens": 1}, "stop", "END", "", 2),
        ([8, 9, 7], {"stop": ("END",), "min_tokens": 2}, "stop", "END", "END", 3),
    ],
)
def test_ends(tokens, params, reason, stop_reason, text, count):
    stop, found, taken = complete(tokens, **params)
    assert (stop.finish_reason, stop.stop_reason, found, taken) == (reason, stop_reason, text, count)


@settings(max_examples=150, deadline=None)
@given(st.text("abc", min_size=1, max_size=25), st.lists(st.text("abc", min_size=1, max_size=4), min_size=1), st.data())
def test_the_cut_does_not_depend_on_the_pieces(text, stop, data):
    """Against looking at each prefix of the text, character by character."""
    expected, matched = text, None
    for end in range(1, len(text) + 1):
        ending = [s for s in stop if text[:end].endswith(s)]
        if ending:
            matched = max(ending, key=len)
            expected = text[: end - len(matched)]
            break
    strings, at, found = StopStrings(stop, False), 0, None
    while at < len(text) and found is None:
        size = data.draw(st.integers(1, len(text) - at))
        found = strings.extend(text[at : at + size], True)
        at += size
    assert found == matched
    assert strings.text == expected


def test_text_is_the_same_with_and_without_stop_strings():
    tokens = [1, 4, 5, 10, 2, 4, 3]
    plain = complete(tokens, max_tokens=7)
    searched = complete(tokens, max_tokens=7, stop=("never",))
    assert plain == searched == (Stop("length", None, 7), "a,bé日\ufffd,c\ufffdd", 7)


def test_a_character_that_began_in_the_prompt_is_finished():
    for stop in ((), ("never",)):
        request = make_request(0, [30, 4], 2, stop=stop)
        checker = StopChecker(request, frozenset(), TOKENIZER)
        assert checker.check([5]) is None
        end = checker.check([5, 3])
        assert checker.text([5, 3], end) == "éd"


def test_stop_strings_end_rows_of_the_engine():
    prompt = [5, 6, 7]
    tokens = naive_greedy(prompt, 30)
    text = "".join(f"<{t}>" for t in tokens)
    stop = f"{tokens[8]}><{tokens[9]}"  # begins and ends inside tokens
    engine, _ = make_engine()
    row, mate = make_request(0, prompt, 30, stop=(stop,)), make_request(1, prompt, 30)
    results = run(engine, [row, mate])
    cut = text.index(stop)
    assert results[row.id].text == text[:cut]
    assert results[row.id].stop_reason == stop
    count = next(n for n in range(1, 31) if stop in "".join(f"<{t}>" for t in tokens[:n]))
    assert results[row.id].token_ids == tokens[:count]
    assert results[mate.id].text == text
    assert np.isfinite(results[row.id].times.latency_ms)
