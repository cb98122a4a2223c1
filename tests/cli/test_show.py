"""`batchinfer show` on outputs written here by hand, and its manners at a terminal."""

import datetime
import json
import os
import subprocess
import sys

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchinfer.cli import main as cli
from batchinfer.errors import ExitCode

TIMES = ("queue_ms", "prefill_ms", "ttft_ms", "tbt_mean_ms", "tbt_p50_ms", "tbt_p99_ms", "tbt_max_ms", "latency_ms")


def output_row(number: int, prefix: str = "", **changes) -> dict:
    result = {
        "request_id": f"0-{number}-0",
        "sample_index": 0,
        "completion": f"answer {number}",
        "finish_reason": "length",
        "stop_reason": None,
        "error_code": None,
        "error_message": None,
        "prompt_tokens": 71,
        "cached_prompt_tokens": 64,
        "completion_tokens": 48,
        "num_preemptions": 0,
        **{name: float(place) for place, name in enumerate(TIMES, 1)},
    }
    inputs = {key: changes.pop(key) for key in list(changes) if key not in result}
    inputs = inputs or {"id": f"r{number}", "prompt": f"question {number}"}
    return {**inputs, **{prefix + name: value for name, value in {**result, **changes}.items()}}


def error_row(number: int) -> dict:
    nothing = dict.fromkeys(("completion", "prompt_tokens", "completion_tokens", *TIMES))
    return output_row(
        number, finish_reason="error", error_code="null_prompt", error_message="the prompt is null", **nothing
    )


@pytest.fixture
def directory(tmp_path):
    """Rows 0 to 29 in parts of 20 and 10 rows, in row groups of 7; rows 5 and 25 failed."""
    rows = [error_row(n) if n in (5, 25) else output_row(n) for n in range(30)]
    table = pa.Table.from_pylist(rows)
    root = tmp_path / "x.completions"
    root.mkdir()
    pq.write_table(table.slice(0, 20), root / "part-00000.parquet", row_group_size=7)
    pq.write_table(table.slice(20), root / "part-00001.parquet", row_group_size=7)
    (root / "_stats.json").write_text("{}")
    return root


@pytest.fixture
def show(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")

    def call(*arguments: object, code: int = 0) -> str:
        with pytest.raises(SystemExit) as left:
            cli.main(["show", *map(str, arguments)])
        captured = capsys.readouterr()
        assert left.value.code == code, captured.err
        return captured.out if code == 0 else captured.err

    return call


def shown_rows(text: str) -> list[int]:
    return [int(line.split()[2]) for line in text.splitlines() if line.startswith("── row ")]


def test_a_row_as_a_person_reads_it(show, directory):
    lines = show(directory, "--rows", "3").splitlines()
    assert lines[0] == "── row 3 · id r3 ".ljust(80, "─")
    assert lines[1] == "prompt      question 3"
    assert lines[2] == "completion  answer 3"
    text = " ".join(" ".join(lines[3:]).split())
    assert text == ("48 tokens (length) · prompt 71 (64 cached) · TTFT 3 ms · TBT 4 ms, p99 6 ms · latency 8 ms")


@pytest.mark.parametrize(
    ("arguments", "rows"),
    [
        ((), list(range(10))),
        (("--limit", "3"), [0, 1, 2]),
        (("--limit", "50"), list(range(30))),
        (("--rows", "0,5-9,19-21,29"), [0, 5, 6, 7, 8, 9, 19, 20, 21, 29]),
        (("--rows", "0-28"), list(range(29))),
        (("--rows", "0-28", "--limit", "2"), [0, 1]),
        (("--rows", "28-99"), [28, 29]),
        (("--errors",), [5, 25]),
        (("--errors", "--rows", "6-29"), [25]),
    ],
)
def test_rows_are_chosen_across_parts(show, directory, arguments, rows):
    assert shown_rows(show(directory, *arguments)) == rows


def test_one_part_counts_its_own_rows(show, directory):
    text = show(directory / "part-00001.parquet", "--rows", "0")
    assert "question 20" in text


@pytest.mark.parametrize(
    ("arguments", "note"),
    [
        ((), "not shown: further rows (--limit N shows more, --rows 0,5-9 others); not shown: input columns a, b"),
        (("--limit", "3"), "not shown: further rows"),
        (("--limit", "12"), "not shown: input columns a, b (--columns A,B chooses)"),
        (("--limit", "12", "--columns", "a"), ""),
        (("--rows", "1-5", "--limit", "2", "--columns", "a"), "further rows (--rows and --limit choose others)"),
        (("--rows", "12-"), None),
        (("--rows", "40"), "no row to show"),
        (("--errors",), "no failed row to show"),
    ],
)
def test_what_is_left_out_is_said(tmp_path, capsys, arguments, note):
    rows = [output_row(n, id=n, prompt="p", **{"a": 1, "b\n": 2}) for n in range(12)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "x.parquet")
    with pytest.raises(SystemExit) as left:
        cli.main(["show", str(tmp_path / "x.parquet"), *arguments])
    said = capsys.readouterr().err
    if note is None:
        assert left.value.code == ExitCode.USAGE
        return
    assert left.value.code == 0
    assert said.count("\n") == bool(note)
    assert note in said


def test_error_row(show, directory):
    text = show(directory, "--rows", "5")
    assert "error       null_prompt: the prompt is null" in text
    assert "completion" not in text
    assert "TTFT" not in text


def test_jsonl_with_messages_samples_and_a_prefix(show, tmp_path):
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": [{"type": "text", "text": "Yo"}]}]
    rows = [
        output_row(0, "out_", messages=messages, completion="a\nb", finish_reason="stop", stop_reason="END"),
        output_row(0, "out_", messages=messages, request_id="0-0-1", sample_index=1, num_preemptions=2),
    ]
    path = tmp_path / "x.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    text = show(path)
    assert "messages    user: Hi\n            assistant: [{" in text
    assert "completion  a\n            b\n" in text
    assert "48 tokens (stop at 'END')" in text
    assert "── row 1 · row 0 of the input, sample 1 ─" in text
    assert "preempted 2 times" in " ".join(text.split())


def test_chosen_columns_of_any_type(show, tmp_path):
    rows = [output_row(0, prompt="hidden", note="seen", day=datetime.date(2024, 5, 17), count=7)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "x.parquet")
    text = show(tmp_path / "x.parquet", "--columns", "note,day,count")
    assert "note        seen\n" in text
    assert "2024-05-17" in text
    assert "count       7\n" in text
    assert "hidden" not in text


def test_without_a_prompt_column_every_input_column_is_shown(show, tmp_path):
    pq.write_table(pa.Table.from_pylist([output_row(0, question="why", topic="sky")]), tmp_path / "x.parquet")
    text = show(tmp_path / "x.parquet")
    assert "question    why" in text
    assert "topic       sky" in text


def test_nanosecond_times_do_not_stop_it(show, tmp_path):
    table = pa.Table.from_pylist([output_row(0)])
    table = table.append_column("at", pa.array([1_700_000_000_000_000_001], pa.timestamp("ns")))
    pq.write_table(table, tmp_path / "x.parquet")
    assert "question 0" in show(tmp_path / "x.parquet")
    assert "2023-11-14" in show(tmp_path / "x.parquet", "--columns", "at")


def test_long_text_is_wrapped_to_the_terminal(show, tmp_path):
    rows = [output_row(0, prompt="word " * 60, completion="x" * 200)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "x.parquet")
    text = show(tmp_path / "x.parquet")
    assert max(map(len, text.splitlines())) <= 80
    assert text.count("word") == 60
    assert text.count("x") == 200 + text.count("prefix")


def test_a_very_long_text_is_cut_unless_asked_for_whole(show, tmp_path):
    pq.write_table(
        pa.Table.from_pylist([output_row(0, prompt="p" * 1000, completion="z" * 2234)]), tmp_path / "x.parquet"
    )
    text = "".join(show(tmp_path / "x.parquet").split())
    assert "zzz…(1,234morecharacters;--fullshowsall)" in text
    assert text.count("z") == 1000
    assert text.count("p" * 100) >= 9
    assert "".join(show(tmp_path / "x.parquet", "--full").split()).count("z") == 2234


def test_the_newer_result_of_an_output_that_was_an_input(show, tmp_path):
    """Columns of the first job are input columns of the second, a column named as an optional one is, too."""
    first = {**output_row(0, logprobs="data"), "completion": "older"}
    second = {name: value for name, value in output_row(0, "out_").items() if name.startswith("out_")}
    pq.write_table(pa.Table.from_pylist([{**first, **second}]), tmp_path / "x.parquet")
    text = show(tmp_path / "x.parquet", "--columns", "completion,logprobs")
    assert "completion  older" in text
    assert "completion  answer 0" in text
    assert "logprobs    data" in text


@pytest.mark.parametrize("suffix", ["gz", "zst"])
def test_compressed_lines(show, tmp_path, suffix):
    lines = "".join(json.dumps(output_row(n)) + "\n" for n in range(5)).encode()
    with pa.output_stream(tmp_path / f"x.jsonl.{suffix}", compression={"gz": "gzip", "zst": "zstd"}[suffix]) as stream:
        stream.write(lines)
    assert shown_rows(show(tmp_path / f"x.jsonl.{suffix}", "--rows", "3,1")) == [1, 3]


def test_parts_go_by_number(show, tmp_path):
    for name in ("part-99999.parquet", "part-100000.parquet"):
        pq.write_table(pa.Table.from_pylist([output_row(0, prompt=name)]), tmp_path / name)
    assert show(tmp_path).index("part-99999") < show(tmp_path).index("part-100000")


def test_a_completion_cannot_drive_the_terminal(show, tmp_path):
    rows = [output_row(0, prompt="\x1b]0;title\x07", completion="a\x1b[2Jb\rc\td\u202e")]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "x.parquet")
    text = show(tmp_path / "x.parquet")
    assert all(c.isprintable() or c == "\n" for c in text)
    assert "a\N{REPLACEMENT CHARACTER}[2Jb" in text


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("absent", (), "there is no such file"),
        ("empty", (), "no finished part there yet"),
        ("input.parquet", (), "not an output of batchinfer"),
        ("broken.parquet", (), "broken.parquet: cannot be read"),
        ("broken.jsonl", (), "broken.jsonl: line 1: invalid JSON"),
        ("list.jsonl", (), "list.jsonl: line 1: a JSON object is needed"),
        ("other.jsonl", (), "not an output of batchinfer"),
        ("good.parquet", ("--rows", "1-x"), "write row numbers and ranges"),
        ("good.parquet", ("--rows", ""), "write row numbers and ranges"),
        ("good.parquet", ("--rows", "9-3"), "write row numbers and ranges"),
        ("good.parquet", ("--columns", "nope"), "--columns nope: the input had the columns id, prompt"),
    ],
)
def test_faults_are_one_line(show, tmp_path, name, arguments, message):
    (tmp_path / "empty").mkdir()
    pq.write_table(pa.table({"prompt": ["a"]}), tmp_path / "input.parquet")
    pq.write_table(pa.Table.from_pylist([output_row(0)]), tmp_path / "good.parquet")
    (tmp_path / "broken.parquet").write_bytes(b"PAR1 not really")
    (tmp_path / "broken.jsonl").write_text("{\n")
    (tmp_path / "list.jsonl").write_text("[1]\n")
    (tmp_path / "other.jsonl").write_text('{"prompt": "a"}\n')
    text = show(tmp_path / name, *arguments, code=ExitCode.USAGE)
    assert message in text
    assert text.startswith("batchinfer: error: ")
    assert text.count("\n") == 1


def test_a_reader_that_leaves_early_hears_nothing(tmp_path):
    rows = [output_row(n, completion="y" * 2000) for n in range(300)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "x.parquet")
    command = [sys.executable, "-c", "from batchinfer.cli.main import main; main()", "show", tmp_path / "x.parquet"]
    with subprocess.Popen(
        [*command, "--limit", "300"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONIOENCODING": "utf-8"},
    ) as process:
        assert process.stdout.readline().startswith("── row 0".encode())
        process.stdout.close()
        assert process.wait(30) == 1
        assert process.stderr.read() == b""


def test_a_part_by_itself_says_of_which_input_file_a_row_is(tmp_path, show):
    rows = [output_row(n, request_id=f"1-{n}-{sample}", sample_index=sample) for n in range(2) for sample in range(2)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "part-00001.parquet")
    headings = [
        line.strip("─ ") for line in show(tmp_path / "part-00001.parquet").splitlines() if line.startswith("──")
    ]
    places = [f"row {n} of input file 2{', sample 1' * sample}" for n in range(2) for sample in range(2)]
    assert headings == [f"row {number} · {place} · id r{number // 2}" for number, place in enumerate(places)]
