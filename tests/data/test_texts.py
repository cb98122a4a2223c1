"""Texts of Parquet, JSON Lines and plain files."""

import gzip
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchinfer.data.texts import iter_texts
from batchinfer.errors import UsageError

TEXTS = ["one", "zwei €", "", "four\nlines"]


def test_each_format(tmp_path):
    pq.write_table(pa.table({"id": [1, 2, 3, 4, 5], "text": [*TEXTS, None]}), tmp_path / "a.parquet")
    lines = "".join(json.dumps({"prompt": text}) + "\n" for text in TEXTS)
    (tmp_path / "b.jsonl").write_text(lines, encoding="utf-8")
    (tmp_path / "c.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    (tmp_path / "d.txt").write_text("all\nof it €\n", encoding="utf-8")
    for name in ("a.parquet", "b.jsonl", "c.jsonl.gz"):
        assert list(iter_texts("--text", str(tmp_path / name))) == TEXTS
    assert list(iter_texts("--text", str(tmp_path / "d.txt"))) == ["all\nof it €\n"]
    assert list(iter_texts("--text", str(tmp_path / "a.parquet"), "text")) == TEXTS


@pytest.mark.parametrize(
    ("name", "column", "message"),
    [
        (
            "a.parquet",
            None,
            r"--text .*a\.parquet: there is no column 'text' or 'prompt'; it has body, n: name one with --text-column",
        ),
        ("a.parquet", "words", "there is no column 'words'; it has body, n"),
        ("a.parquet", "n", r"column 'n' holds int in row 0, not text"),
        ("a.txt", "n", r"a plain text file has no column 'n'"),
        ("missing.txt", None, r"--text .*missing\.txt: cannot be read"),
        ("latin.txt", None, r"--text .*latin\.txt: cannot be read"),
        ("missing.parquet", None, r"--text .*missing\.parquet: no such file"),
        ("noname", None, r"the name must end in \.parquet"),
    ],
)
def test_what_cannot_be_read_is_said(tmp_path, name, column, message):
    pq.write_table(pa.table({"body": ["x"], "n": [1]}), tmp_path / "a.parquet")
    (tmp_path / "a.txt").write_text("x")
    (tmp_path / "noname").write_text("x")
    (tmp_path / "latin.txt").write_bytes(b"\xe9t\xe9")
    with pytest.raises(UsageError, match=message):
        list(iter_texts("--text", str(tmp_path / name), column))


def test_what_is_no_text_is_rendered_where_somebody_can(tmp_path):
    chat = [{"role": "user", "content": "one"}]
    rows = [{"messages": chat}, {"messages": "zwei"}, {"messages": None}]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    path = str(tmp_path / "a.jsonl")
    columns = ("text", "messages")
    found = iter_texts("--text", path, None, columns, lambda messages: f"<{messages[0]['content']}>")
    assert list(found) == ["<one>", "zwei"]

    def refuse(messages):
        raise ValueError("such roles\nare not known")

    with pytest.raises(UsageError, match=r"a.jsonl: column 'messages' holds no chat messages in row 0: such roles"):
        list(iter_texts("--text", path, None, columns, refuse))
