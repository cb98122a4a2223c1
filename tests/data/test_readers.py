"""Rows as they are read: JSON Lines of every kind under one schema, exact Arrow types, bounded slices, any start."""

import datetime
import gzip
import json
import math
from collections.abc import Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchinfer.config import InputConfig
from batchinfer.data import jsonl, parquet_input, readers
from batchinfer.data.jsonl_schema import is_json_text
from batchinfer.data.readers import RowBatch, iter_rows, iter_selected
from batchinfer.data.shards import Shard, ShardSet, discover
from batchinfer.errors import BatchInferError


def found(*inputs: object) -> ShardSet:
    return discover(InputConfig(input=tuple(str(text) for text in inputs)))


def write(path: Path, content: str | bytes) -> Path:
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def one_shard(path: Path, content: str | bytes) -> Shard:
    return found(write(path, content)).shards[0]


def read(shard: Shard, start: int = 0, stop: int | None = None, columns: Sequence[str] | None = None) -> list[Any]:
    """All rows as dicts, after checking that the batches are contiguous and of the announced schema."""
    rows: list[Any] = []
    for batch in iter_rows(shard, start, stop, columns):
        assert batch.start == start + len(rows)
        wanted = shard.schema if columns is None else pa.schema([shard.schema.field(c) for c in columns])
        assert batch.table.schema.equals(wanted)
        rows += batch.table.to_pylist()
    return rows


def faults(shard: Shard, start: int = 0, stop: int | None = None) -> dict[int, str]:
    return {b.start + offset: text for b in iter_rows(shard, start, stop) for offset, text in b.errors.items()}


def types(shard: Shard) -> dict[str, str]:
    return {f.name: "json" if is_json_text(f) else str(f.type) for f in shard.schema}


# ---- JSON Lines: lines


def test_a_line_larger_than_any_block_is_a_row(tmp_path: Path) -> None:
    big = "x" * 3_000_000
    shard = one_shard(tmp_path / "a.jsonl", json.dumps({"prompt": big}) + '\n{"prompt": "short"}\n')
    assert [row["prompt"] for row in read(shard)] == [big, "short"]


def test_a_line_beyond_the_documented_limit_is_an_error_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jsonl, "MAX_LINE_BYTES", 2 << 20)
    long = json.dumps({"prompt": "x" * (5 << 20)})
    shard = one_shard(tmp_path / "a.jsonl", f'{{"prompt": "a"}}\n{long}\n{{"prompt": "b"}}\n{long}')
    assert [row["prompt"] for row in read(shard)] == ["a", None, "b", None]
    assert faults(shard) == {n - 1: f"line {n}: the line is longer than 2 MiB" for n in (2, 4)}


@pytest.mark.parametrize("suffix", ["jsonl", "ndjson", "jsonl.gz", "jsonl.zst"])
def test_compression_blank_lines_bom_crlf_and_missing_end(tmp_path: Path, suffix: str) -> None:
    plain = b'\xef\xbb\xbf{"a": 1}\r\n\n  \t\r\n{"a": 2}\r\n{"a": 3}'
    halves = plain[:9], plain[9:]  # several members or frames make one stream
    packed = {
        "gz": b"".join(gzip.compress(half) for half in halves),
        "zst": b"".join(pa.compress(half, codec="zstd", asbytes=True) for half in halves),
    }
    shard = one_shard(tmp_path / f"x.{suffix}", packed.get(suffix.rpartition(".")[2], plain))
    assert shard.num_rows == 3
    assert read(shard) == [{"a": 1}, {"a": 2}, {"a": 3}]
    assert read(shard, 2) == [{"a": 3}]


UNREADABLE = {
    "plain text": (b"hello", "invalid JSON (Expecting value at character 1)"),
    "cut": (b'{"a": 1', "invalid JSON (Expecting ',' delimiter at character 8)"),
    "two values": (b'{"a": 1} {"a": 2}', "invalid JSON (Extra data at character 10)"),
    "list": (b"[1, 2]", "a JSON object is needed, this is a list"),
    "string": (b'"x"', "a JSON object is needed, this is a string"),
    "number": (b"1.5", "a JSON object is needed, this is a number"),
    "true": (b"true", "a JSON object is needed, this is true or false"),
    "null": (b"null", "a JSON object is needed, this is null"),
    "latin-1": (b'{"a": "\xe9"}', "not UTF-8 (byte 0xe9 at position 8)"),
    "surrogate": (b'{"a": "\\ud83d"}', "column 'a' holds half of a surrogate pair, which is no text"),
    "surrogate name": (b'{"\\uD83D": 1}', "column '\\ud83d' holds half of a surrogate pair, which is no text"),
    "deep": (b'{"a": ' + b"[" * 250 + b"]" * 250 + b"}", "nested more than 200 levels deep"),
    "very deep": (b'{"a": ' + b"[" * 9999 + b"]" * 9999 + b"}", "nested more than 200 levels deep"),
    "digits": (b'{"a": ' + b"9" * 5000 + b"}", "a number has too many digits"),
}


@pytest.mark.parametrize("kind", UNREADABLE)
def test_an_unreadable_line_is_a_row_of_nulls_with_its_reason(tmp_path: Path, kind: str) -> None:
    line, message = UNREADABLE[kind]
    shard = one_shard(tmp_path / "a.jsonl", b'{"a": "x", "b": 1}\n\n' + line + b'\n{"a": "y", "b": 2}\n')
    nulls = {"a": None, "b": None}
    assert read(shard) == [{"a": "x", "b": 1}, nulls, {"a": "y", "b": 2}]
    assert faults(shard) == {1: f"line 3: {message}"}
    assert faults(shard, 1, 2) == {1: f"line 3: {message}"}
    batches = list(iter_rows(shard, 0, None, ["b"]))  # the verdict does not depend on the columns read
    assert [batch.errors for batch in batches] == [{1: f"line 3: {message}"}]


def test_nesting_within_the_limit_is_kept(tmp_path: Path) -> None:
    deep = "[" * 199 + "]" * 199
    shard = one_shard(tmp_path / "a.jsonl", f'{{"a": {deep}, "b": "{"[" * 300}"}}\n')
    assert read(shard) == [{"a": deep, "b": "[" * 300}]


def test_row_numbers_are_stable_wherever_reading_starts(tmp_path: Path) -> None:
    content = []
    for row in range(5000):
        content += ["\n"] * (row % 3 == 0) + [f'{{"id": {row}}}\n' if row % 7 else "broken\n"]
    expected = [row if row % 7 else None for row in range(5000)]
    plain = "".join(content).encode()
    for name, packed in (("a.jsonl", plain), ("a.jsonl.gz", gzip.compress(plain))):
        shard = one_shard(tmp_path / name, packed)
        for start, stop in ((0, None), (1, 2), (1023, 1026), (1024, 1025), (3000, 4999), (4999, 5000), (4096, None)):
            assert [r["id"] for r in read(shard, start, stop)] == expected[start:stop]
        whole = faults(shard)
        assert set(whole) == set(range(0, 5000, 7))
        assert faults(shard, 2345, 4321) == {row: text for row, text in whole.items() if 2345 <= row < 4321}
        lines = plain.split(b"\n")
        assert all(lines[int(text.split()[1].rstrip(":")) - 1] == b"broken" for text in whole.values())
        assert read(shard, 10, 10) == read(shard, 5000) == []


def test_remote_jsonl_starts_in_the_middle() -> None:
    content = "".join(f'{{"id": {row}}}\n' for row in range(3000)).encode()
    fs = fsspec.filesystem("memory")
    fs.pipe("/readers/a.jsonl", content)
    fs.pipe("/readers/b.jsonl.zst", pa.compress(content, codec="zstd", asbytes=True))
    for shard in found("memory://readers").shards:
        assert [row["id"] for row in read(shard, 2100, 2103)] == [2100, 2101, 2102]


# ---- JSON Lines: one schema over the whole input


def test_a_value_that_appears_late_decides_the_type(tmp_path: Path) -> None:
    shard = one_shard(tmp_path / "a.jsonl", '{"prompt": "p", "meta": null}\n' * 3000 + '{"prompt": "p", "meta": "x"}\n')
    assert types(shard) == {"prompt": "string", "meta": "string"}
    assert [row["meta"] for row in read(shard)] == [None] * 3000 + ["x"]


def test_string_and_list_in_one_column_are_both_kept(tmp_path: Path) -> None:
    first = [{"role": "user", "content": "hi"}]
    second = [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]
    text = "".join(json.dumps({"messages": m}) + "\n" for m in (first, second))
    shard = one_shard(tmp_path / "a.jsonl", text)
    assert types(shard) == {"messages": "json"}
    assert [json.loads(row["messages"]) for row in read(shard)] == [first, second]


def test_one_schema_over_all_jsonl_shards_of_the_input(tmp_path: Path) -> None:
    first = write(tmp_path / "a.jsonl", '{"prompt": "p", "score": null, "tag": 1}\n')
    pq.write_table(pa.table({"prompt": ["q"], "score": [True]}), tmp_path / "b.parquet")
    last = write(tmp_path / "c.jsonl.gz", gzip.compress(b'{"score": 0.5, "tag": "x", "extra": [1]}\n'))
    shards = found(first, tmp_path / "b.parquet", last).shards
    assert types(shards[0]) == {"prompt": "string", "score": "double", "tag": "json", "extra": "json"}
    assert shards[2].schema.equals(shards[0].schema, check_metadata=True)
    assert types(shards[1]) == {"prompt": "string", "score": "bool"}
    assert read(shards[0]) == [{"prompt": "p", "score": None, "tag": "1", "extra": None}]
    assert read(shards[2]) == [{"prompt": None, "score": 0.5, "tag": '"x"', "extra": "[1]"}]


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        (["null"], "string"),
        (["true", "null", "false"], "bool"),
        (["1", "-9223372036854775808", "9223372036854775807"], "int64"),
        (["9007199254740993", "null"], "int64"),
        (["1.5", "1"], "double"),
        (["NaN", "Infinity", "-Infinity", "2"], "double"),
        (["0.5", "9007199254740992", "18014398509481984"], "double"),
        (["0.5", "9007199254740993"], "json"),
        (["9223372036854775808"], "json"),
        (["1", "123456789012345678901234567890"], "json"),
        (["true", "1"], "json"),
        (["true", '"x"'], "json"),
        (['"a"', "null", '""', "NaN"], "json"),
        (['{"b": [1, {"c": null}]}', "null"], "json"),
        (['["\\ud83d", "\\u00e9 \\ud83d\\ude00"]'], "json"),
        (['{"x": 1, "x": 2}'], "json"),
        (['{"x": 1e400, "y": -0.0}'], "json"),
    ],
)
def test_columns_get_the_narrowest_type_that_loses_nothing(tmp_path: Path, values: list[str], kind: str) -> None:
    shard = one_shard(tmp_path / "a.jsonl", "".join(f'{{"v": {value}}}\n' for value in values))
    assert types(shard) == {"v": kind}
    got = [row["v"] for row in read(shard)]
    expected = [json.loads(value) for value in values]
    if kind == "json":
        got = [None if value is None else json.loads(value) for value in got]
    assert repr(got) == repr([float(v) if kind == "double" else v for v in expected])  # repr: NaN equals itself


def test_a_name_that_occurs_twice_keeps_its_last_value(tmp_path: Path) -> None:
    assert read(one_shard(tmp_path / "a.jsonl", '{"a": 1, "b": 0, "a": 2}\n')) == [{"a": 2, "b": 0}]


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=60, deadline=None)
@given(rows=st.lists(st.dictionaries(st.sampled_from(["a", "b", "ü.x"]), JSON_VALUES, min_size=1), min_size=1))
def test_any_json_comes_back_equal(tmp_path_factory: pytest.TempPathFactory, rows: list[dict[str, Any]]) -> None:
    path = tmp_path_factory.mktemp("any") / "a.jsonl"
    shard = one_shard(path, "".join(json.dumps(row) + "\n" for row in rows))
    as_json = {field.name for field in shard.schema if is_json_text(field)}
    for row, got in zip(rows, read(shard), strict=True):
        for name, value in got.items():
            back = json.loads(value) if name in as_json and value is not None else value
            wanted = row.get(name)
            assert back == wanted or repr(back) == repr(wanted)


def test_chosen_columns_come_in_the_order_asked(tmp_path: Path) -> None:
    shard = one_shard(tmp_path / "a.jsonl", '{"a": 1, "b": "x", "c": [2]}\n')
    assert [list(row.items()) for row in read(shard, columns=["c", "a"])] == [[("c", "[2]"), ("a", 1)]]
    with pytest.raises(KeyError):
        list(iter_rows(shard, 0, None, ["nope"]))


def test_batches_of_json_rows_are_bounded_by_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readers, "SLICE_BYTES", 100_000)
    sizes = [10, 60_000, 60_000, 10, 300_000, 10, 10]
    shard = one_shard(tmp_path / "a.jsonl", "".join(json.dumps({"p": "x" * size}) + "\n" for size in sizes))
    batches = list(iter_rows(shard, 0, None))
    assert [[len(p) for p in b.table["p"].to_pylist()] for b in batches] == [
        [10, 60_000],
        [60_000, 10],
        [300_000],
        [10, 10],
    ]
    assert [batch.start for batch in batches] == [0, 2, 4, 5]


# ---- Parquet


def parquet_shard(path: Path, table: pa.Table, **options: Any) -> Shard:
    pq.write_table(table, path, **options)
    return found(path).shards[0]


def test_int64_with_nulls_stays_exact(tmp_path: Path) -> None:
    ids = [9007199254740993, None]
    shard = parquet_shard(tmp_path / "a.parquet", pa.table({"id": pa.array(ids, pa.int64())}))
    assert shard.schema.field("id").type == pa.int64()
    assert [row["id"] for row in read(shard)] == ids


def test_null_empty_and_nan_prompts_stay_what_they_are(tmp_path: Path) -> None:
    shard = parquet_shard(
        tmp_path / "a.parquet", pa.table({"prompt": ["a", None, ""], "x": pa.array([math.nan, None, 1.0])})
    )
    rows = read(shard)
    assert [row["prompt"] for row in rows] == ["a", None, ""]
    assert math.isnan(rows[0]["x"])
    assert rows[1]["x"] is None
    lines = one_shard(tmp_path / "b.jsonl", '{"prompt": "a"}\n{"prompt": null}\n{"prompt": ""}\n{}\n')
    assert [row["prompt"] for row in read(lines)] == ["a", None, "", None]


NOON = datetime.datetime(2024, 3, 10, 12, tzinfo=datetime.UTC)
EXACT = {
    "timestamp zone": pa.array([NOON, None], pa.timestamp("ns", "US/Eastern")),
    "timestamp": pa.array([1, None], pa.timestamp("us")),
    "date32": pa.array([datetime.date(1969, 7, 20), None], pa.date32()),
    "date64": pa.array([datetime.date(1969, 7, 20), None], pa.date64()),
    "time64": pa.array([1, None], pa.time64("ns")),
    "duration": pa.array([5, None], pa.duration("ms")),
    "decimal": pa.array([Decimal("1.10"), None], pa.decimal128(38, 2)),
    "decimal256": pa.array([Decimal("-1.100"), None], pa.decimal256(60, 3)),
    "large_string": pa.array(["x", None], pa.large_string()),
    "string_view": pa.array(["x", None], pa.string_view()),
    "binary": pa.array([b"\xff\x00", None], pa.binary()),
    "fixed binary": pa.array([b"abc", None], pa.binary(3)),
    "float16": pa.array(np.array([1.5, 2], np.float16)),
    "uint64": pa.array([2**64 - 1, None], pa.uint64()),
    "dictionary": pa.array(["x", None], pa.dictionary(pa.int8(), pa.string())),
    "large dictionary": pa.array(["x", None], pa.dictionary(pa.int32(), pa.large_string())),
    "struct": pa.array([{"a": "x", "b": [1, None]}, None]),
    "list of struct": pa.array(
        [[{"role": "user", "day": None}], []], pa.list_(pa.struct({"role": "string", "day": pa.date64()}))
    ),
    "map": pa.array([[("k", 1)], None], pa.map_(pa.string(), pa.int32())),
    "fixed list": pa.array([[1.0, 2.0], None], pa.list_(pa.float32(), 2)),
    "large list": pa.array([[1], None], pa.large_list(pa.int8())),
    "null": pa.nulls(2),
    "uuid": pa.array([b"0123456789abcdef", None], pa.uuid()),
    "tensor": pa.ExtensionArray.from_storage(
        pa.fixed_shape_tensor(pa.float32(), [2]), pa.array([[1, 2], [3, 4]], pa.list_(pa.float32(), 2))
    ),
}


@pytest.mark.parametrize("kind", EXACT)
def test_types_values_and_metadata_are_kept_through_parquet(tmp_path: Path, kind: str) -> None:
    array = EXACT[kind]
    field = pa.field("c", array.type, metadata={"unit": "none"})
    table = pa.table([array], schema=pa.schema([field], metadata={"origin": "test"}))
    shard = parquet_shard(tmp_path / "a.parquet", table)
    assert shard.schema.equals(table.schema)
    assert shard.schema.metadata == {b"origin": b"test"}
    assert shard.schema.field("c").metadata[b"unit"] == b"none"
    batches = [batch.table for batch in iter_rows(shard, 0, None)]
    assert pa.Table.from_batches(batches).equals(table)
    again = parquet_shard(tmp_path / "b.parquet", pa.Table.from_batches(batches))  # what the output's reader sees
    assert pa.Table.from_batches([batch.table for batch in iter_rows(again, 0, None)]).equals(table)


def test_an_unregistered_extension_type_keeps_its_name(tmp_path: Path) -> None:
    metadata = {"ARROW:extension:name": "acme.secret", "ARROW:extension:metadata": "v1"}
    schema = pa.schema([pa.field("c", pa.int32(), metadata=metadata)])
    shard = parquet_shard(tmp_path / "a.parquet", pa.table([pa.array([1], pa.int32())], schema=schema))
    kept = next(iter_rows(shard, 0, None)).table.schema.field("c").metadata
    assert kept[b"ARROW:extension:name"] == b"acme.secret"
    assert kept[b"ARROW:extension:metadata"] == b"v1"


def test_columns_with_dots_in_their_names(tmp_path: Path) -> None:
    table = pa.table({"a": pa.array([{"b": 1}]), "a.b": ["dotted"], "c": [3]})
    shard = parquet_shard(tmp_path / "a.parquet", table)
    assert read(shard, columns=["c", "a.b"]) == [{"c": 3, "a.b": "dotted"}]
    assert read(shard, columns=["a"]) == [{"a": {"b": 1}}]
    assert read(shard) == [{"a": {"b": 1}, "a.b": "dotted", "c": 3}]


def test_any_range_of_a_file_with_many_row_groups(tmp_path: Path) -> None:
    shard = parquet_shard(tmp_path / "a.parquet", pa.table({"id": range(1000)}), row_group_size=130)
    for start, stop in ((0, None), (0, 1), (129, 131), (130, 260), (500, 777), (999, 1000), (400, 5000)):
        assert [row["id"] for row in read(shard, start, stop)] == list(range(1000))[start:stop]
    sizes = [batch.num_rows for batch in iter_rows(shard, 100, 140, batch_rows=16)]
    assert sum(sizes) == 40
    assert max(sizes) == 16


def test_row_groups_outside_the_range_are_not_decoded(tmp_path: Path) -> None:
    """Their pages are overwritten, so decoding one would fail."""
    path = tmp_path / "a.parquet"
    table = pa.table({"id": pa.array(range(300), pa.int64())})
    shard = parquet_shard(path, table, row_group_size=100, compression="none", use_dictionary=False)
    metadata, content = pq.read_metadata(path), bytearray(path.read_bytes())
    for group in (0, 2):
        column = metadata.row_group(group).column(0)
        begin = column.data_page_offset
        content[begin : begin + column.total_compressed_size] = b"\xff" * column.total_compressed_size
    path.write_bytes(content)
    assert [row["id"] for row in read(shard, 100, 200)] == list(range(100, 200))
    with pytest.raises(BatchInferError, match=r"a\.parquet: cannot be read"):
        read(shard, 99, 200)
    with pytest.raises(BatchInferError, match=r"a\.parquet: cannot be read"):
        read(shard, 100, 201)


def slices(shard: Shard, **options: Any) -> list[RowBatch]:
    batches = list(iter_rows(shard, 0, None, **options))
    assert [b.start for b in batches] == np.cumsum([0, *(b.num_rows for b in batches)])[:-1].tolist()
    return batches


@pytest.mark.parametrize("repeated", [False, True], ids=["plain pages", "dictionary pages"])
def test_slices_of_a_large_row_group_are_bounded_by_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, repeated: bool
) -> None:
    monkeypatch.setattr(parquet_input, "SLICE_BYTES", 100_000)
    texts = [("x" if repeated else chr(97 + i % 26)) * 10_000 + ("" if repeated else str(i)) for i in range(200)]
    messages = [[{"role": "user", "content": text}] for text in texts]
    shard = parquet_shard(tmp_path / "a.parquet", pa.table({"messages": messages}))
    batches = slices(shard)
    assert max(batch.table.nbytes for batch in batches) <= 100_000
    assert len(batches) <= 2 * 200 * 10_100 / 100_000  # and not needlessly small
    assert [m for b in batches for m in b.table["messages"].to_pylist()] == messages


def test_rows_that_grow_shrink_the_slices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parquet_input, "SLICE_BYTES", 50_000)
    asked: list[int] = []
    decode = parquet_input._decode

    def spy(file: Any, columns: Any, start: int, stop: int, size: int) -> Any:
        asked.append(size)
        return decode(file, columns, start, stop, size)

    monkeypatch.setattr(parquet_input, "_decode", spy)
    texts = ["s" * 20] * 2000 + ["y" * 40_000] * 300  # the footer's average hides the tail
    shard = parquet_shard(tmp_path / "a.parquet", pa.table({"p": texts}))
    batches = slices(shard)
    assert [p for b in batches for p in b.table["p"].to_pylist()] == texts
    assert max(batch.table.nbytes for batch in batches) <= 50_000
    assert asked == sorted(asked, reverse=True)
    assert asked[-1] < asked[0]


def test_a_nested_column_beyond_the_limit_of_arrow_is_read_in_smaller_slices(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shard = parquet_shard(tmp_path / "a.parquet", pa.table({"m": [[{"c": str(i)}] for i in range(500)]}))
    decode = parquet_input._decode

    def fail_when_large(file: Any, columns: Any, start: int, stop: int, size: int) -> Any:
        if size > 20:
            raise pa.ArrowNotImplementedError("Nested data conversions not implemented for chunked array outputs")
        return decode(file, columns, start, stop, size)

    monkeypatch.setattr(parquet_input, "_decode", fail_when_large)
    assert [m[0]["c"] for b in slices(shard) for m in b.table["m"].to_pylist()] == [str(i) for i in range(500)]


def test_more_than_two_gib_of_nested_text_in_one_row_group(tmp_path: Path) -> None:
    """2,300 rows that share one MiB of text: small on disk, over 2 GiB when decoded at once."""
    item = pa.array([{"role": "user", "content": "x" * (1 << 20)}])
    rows = 2300
    path = tmp_path / "a.parquet"
    schema = pa.schema({"messages": pa.list_(item.type)})
    with pq.ParquetWriter(path, schema, compression="zstd", dictionary_pagesize_limit=4 << 20) as writer:
        chunk = pa.ListArray.from_arrays(range(101), pa.concat_arrays([item] * 100))
        batch = pa.record_batch([chunk], schema=schema)
        writer.write_table(pa.Table.from_batches([batch] * (rows // 100)), row_group_size=rows)
    assert pq.read_metadata(path).num_row_groups == 1
    sizes = []
    for batch in iter_rows(found(path).shards[0], 0, None):
        sizes.append((batch.num_rows, batch.table.nbytes))
        assert batch.table["messages"][0].as_py()[0]["content"] == "x" * (1 << 20)
    assert sum(n for n, _ in sizes) == rows
    assert max(nbytes for _, nbytes in sizes) <= parquet_input.SLICE_BYTES
    assert pa.total_allocated_bytes() < 1 << 30


# ---- directories saved by `datasets`


def test_saved_dataset_rows_types_and_ranges(tmp_path: Path) -> None:
    import datasets

    features = datasets.Features({"id": datasets.Value("int64"), "day": datasets.Value("date64")})
    days = [datetime.date(2000, 1, 1) + datetime.timedelta(days=i) for i in range(3000)]
    data = datasets.Dataset.from_dict({"id": [None, *range(1, 3000)], "day": days}, features=features)
    data.save_to_disk(str(tmp_path / "ds"))
    (shard,) = found(tmp_path / "ds").shards
    assert shard.schema.field("day").type == pa.date64()
    assert [row["id"] for row in read(shard)] == [None, *range(1, 3000)]
    assert [row["id"] for row in read(shard, 995, 2005, ["id"])] == list(range(995, 2005))
    assert [row["day"] for row in read(shard, 2999)] == [days[-1]]
    assert max(batch.num_rows for batch in iter_rows(shard, 0, None, batch_rows=64)) == 64


# ---- files that change during the job


def test_a_file_that_changed_since_discovery_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    shard = one_shard(path, '{"a": 1}\n' * 10)
    write(path, '{"a": 1}\n' * 4)
    with pytest.raises(BatchInferError, match=r"a\.jsonl: ends at row 4 of 10: it changed or went away"):
        read(shard)
    write(path, '{"a": "x"}\n' * 10)
    with pytest.raises(BatchInferError, match=r"a\.jsonl: rows from 0 on hold other types than before"):
        read(shard)
    path.unlink()
    with pytest.raises(BatchInferError, match=r"a\.jsonl: cannot be read \(.*No such file"):
        read(shard)


def test_a_fault_of_the_consumer_is_not_blamed_on_the_file(tmp_path: Path) -> None:
    shard = one_shard(tmp_path / "a.jsonl", '{"a": 1}\n')

    def consume() -> None:
        for _ in iter_rows(shard, 0, None):
            raise OSError("disk full")

    with pytest.raises(OSError, match=r"^disk full$"):
        consume()


# ---- some of the rows


def test_runs_are_the_stretches_of_wanted_rows() -> None:
    batch = RowBatch(100, pa.record_batch({"a": list(range(8))}), {2: "bad", 6: "worse"})
    runs = list(batch.runs(np.array([1, 0, 1, 1, 0, 0, 1, 1], np.bool_)))
    assert [(run.start, run.table["a"].to_pylist(), run.errors) for run in runs] == [
        (100, [0], {}),
        (102, [2, 3], {0: "bad"}),
        (106, [6, 7], {0: "worse"}),
    ]
    assert list(batch.runs(np.zeros(8, np.bool_))) == []


@pytest.mark.parametrize("name", ["a.parquet", "a.jsonl"])
def test_selected_rows_only(tmp_path: Path, name: str) -> None:
    pq.write_table(pa.table({"id": range(3000)}), tmp_path / "a.parquet", row_group_size=500)
    write(tmp_path / "a.jsonl", "".join(f'{{"id": {row}}}\n' for row in range(3000)))
    (shard,) = found(tmp_path / name).shards
    selection = np.array([3, 4, 5, 1023, 1024, 2999])
    batches = list(iter_selected(shard, selection))
    assert [row["id"] for b in batches for row in b.table.to_pylist()] == selection.tolist()
    assert all(b.table["id"].to_pylist() == list(range(b.start, b.start + b.num_rows)) for b in batches)
    some = iter_selected(shard, selection, 4, 1024, ["id"])
    assert [row["id"] for b in some for row in b.table.to_pylist()] == [4, 5, 1023]
    assert list(iter_selected(shard, selection, 6, 1000)) == []
    assert sum(b.num_rows for b in iter_selected(shard, None)) == 3000


# ---- long runs


def test_memory_stays_flat_over_many_rows(tmp_path: Path) -> None:
    """Peak of Python allocations over 12,000 rows is no larger than over 3,000 (the index alone grows)."""
    import tracemalloc

    def peak_bytes(rows: int) -> int:
        path = write(
            tmp_path / f"{rows}.jsonl", "".join(f'{{"id": {row}, "p": "text {row}"}}\n' for row in range(rows))
        )
        tracemalloc.start()
        (shard,) = found(path).shards
        for _ in iter_rows(shard, 0, None):
            pass
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return peak

    small, large = peak_bytes(3000), peak_bytes(12_000)
    assert large < small + 100_000


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_rows_are_counted_where_no_column_is_wanted(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"a.{suffix}"
    if suffix == "jsonl":
        write(path, '{"a": 1, "b": 2}\n' * 5)
    else:
        pq.write_table(pa.table({"a": [1] * 5, "b": [2] * 5}), path)
    shard = found(path).shards[0]
    batches = iter_rows(shard, 1, 4, [], batch_rows=2)
    assert [batch.start + offset for batch in batches for offset in range(batch.num_rows)] == [1, 2, 3]
