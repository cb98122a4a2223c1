"""Discovery: which files are shards, in what order, with what fingerprint, and each fault as one line."""

import gzip
import hashlib
import io
import os
import random
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchinfer.config import InputConfig
from batchinfer.data.saved_dataset import check_hub, is_hub_split
from batchinfer.data.shards import ShardSet, discover
from batchinfer.errors import ExitCode, UsageError


def found(*inputs: object) -> ShardSet:
    return discover(InputConfig(input=tuple(str(text) for text in inputs)))


def names(shard_set: ShardSet) -> list[str]:
    return [os.path.basename(shard.uri) for shard in shard_set.shards]


def parquet(path: Path, rows: int = 2) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table({"prompt": [f"{path.name} {i}" for i in range(rows)]}), path)
    return path


def lines(path: Path, *rows: str) -> Path:
    path.write_text("".join(row + "\n" for row in rows))
    return path


def refusal(*inputs: object) -> str:
    with pytest.raises(UsageError) as caught:
        found(*inputs)
    assert caught.value.exit_code == ExitCode.USAGE
    message = str(caught.value)
    assert "\n" not in message
    return message


# ---- which files, in what order


def test_order_is_as_given_and_sorted_inside_a_directory(tmp_path: Path) -> None:
    for name in ("b", "a", "c"):
        parquet(tmp_path / "dir" / f"{name}.parquet")
    last = lines(tmp_path / "z.jsonl", '{"prompt": "x"}')
    first = parquet(tmp_path / "zz.parquet", rows=3)
    shard_set = found(first, tmp_path / "dir", last)
    assert names(shard_set) == ["zz.parquet", "a.parquet", "b.parquet", "c.parquet", "z.jsonl"]
    assert [shard.index for shard in shard_set.shards] == [0, 1, 2, 3, 4]
    assert [shard.num_rows for shard in shard_set.shards] == [3, 2, 2, 2, 1]
    assert shard_set.num_rows == 10
    assert [shard.format for shard in shard_set.shards] == ["parquet"] * 4 + ["jsonl"]


def test_glob_is_sorted_and_recursive_where_asked(tmp_path: Path) -> None:
    parquet(tmp_path / "day=2" / "x.parquet")
    parquet(tmp_path / "day=1" / "y.parquet")
    parquet(tmp_path / "day=1" / "_temporary" / "half.parquet")
    shard_set = found(tmp_path / "**" / "*.parquet")
    assert names(shard_set) == ["y.parquet", "x.parquet"]
    assert [os.path.basename(uri) for uri, _ in shard_set.skipped] == ["half.parquet"]


def test_underscore_and_dot_names_are_skipped_and_reported_in_directories(tmp_path: Path) -> None:
    for name in ("_a.parquet", ".b.parquet", "c.parquet"):
        parquet(tmp_path / name)
    lines(tmp_path / "notes.txt", "hello")
    lines(tmp_path / "list.json", "[1]")
    (tmp_path / "sub").mkdir()
    for argument in (tmp_path, tmp_path / "*"):
        shard_set = found(argument)
        assert names(shard_set) == ["c.parquet"]
        reasons = {os.path.basename(uri): reason for uri, reason in shard_set.skipped}
        assert set(reasons) == {"_a.parquet", ".b.parquet", "notes.txt", "list.json", "sub"}
        assert "begins with _ or ." in reasons["_a.parquet"]
        assert "not .parquet or .jsonl" in reasons["notes.txt"]
        assert "subdirectory" in reasons["sub"]


def test_a_named_file_is_read_whatever_its_name(tmp_path: Path) -> None:
    hidden = [parquet(tmp_path / "_dir" / "_a.parquet"), parquet(tmp_path / "_dir" / ".b.parquet")]
    assert names(found(*hidden)) == ["_a.parquet", ".b.parquet"]
    assert names(found(tmp_path / "_dir" / "_*.parquet")) == ["_a.parquet"]


def test_a_file_whose_name_looks_like_a_glob_is_read(tmp_path: Path) -> None:
    parquet(tmp_path / "a.parquet")
    assert names(found(parquet(tmp_path / "[a].parquet"))) == ["[a].parquet"]


def test_relative_paths_become_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = parquet(tmp_path / "a.parquet")
    monkeypatch.chdir(tmp_path)
    assert found("a.parquet").shards[0].uri == str(path)
    assert found(f"file://{path}").shards[0].uri == str(path)


def test_a_file_named_twice_is_refused(tmp_path: Path) -> None:
    path = parquet(tmp_path / "a.parquet")
    assert "a.parquet: found twice" in refusal(path, tmp_path / "*.parquet")


# ---- nothing to read


def test_directory_with_hidden_files_only_is_an_error_that_lists_them(tmp_path: Path) -> None:
    parquet(tmp_path / "_a.parquet")
    message = refusal(tmp_path)
    assert "no .parquet or .jsonl" in message
    assert "_a.parquet (its name begins with _" in message


def test_no_input_no_file_and_unknown_kind(tmp_path: Path) -> None:
    assert "--input is missing" in refusal()
    assert "nowhere.parquet: no such file" in refusal(tmp_path / "nowhere.parquet")
    assert "cannot tell the format" in refusal(lines(tmp_path / "rows.json", '{"a": 1}'))
    assert "no .parquet or .jsonl" in refusal(tmp_path / "*.parquet")


def test_no_rows_at_all_is_an_error_and_one_rowless_file_is_skipped(tmp_path: Path) -> None:
    empty = parquet(tmp_path / "a.parquet", rows=0)
    blank = lines(tmp_path / "b.jsonl", "", "  ")
    assert "no rows in 2 files" in refusal(empty, blank)
    shard_set = found(empty, parquet(tmp_path / "c.parquet"), blank)
    assert names(shard_set) == ["c.parquet"]
    assert shard_set.shards[0].index == 0
    assert shard_set.skipped == ((str(empty), "no rows"), (str(blank), "no rows"))


@pytest.mark.parametrize("name", ["x.jsonl", "x.ndjson"])
def test_plain_lines_may_be_none(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"")
    shard_set = found(parquet(tmp_path / "good.parquet"), tmp_path / name)
    assert names(shard_set) == ["good.parquet"]
    assert shard_set.skipped == ((str(tmp_path / name), "no rows"),)


def test_the_jobs_own_output_among_its_input_is_skipped(tmp_path: Path) -> None:
    parquet(tmp_path / "a.parquet")
    output = parquet(tmp_path / "b.parquet")
    for text in (str(tmp_path), f"{tmp_path}/*.parquet"):
        shard_set = discover(InputConfig(input=(text,)), str(output))
        assert names(shard_set) == ["a.parquet"]
        assert shard_set.skipped == ((str(output), "the output of this job"),)
    assert len(discover(InputConfig(input=(str(tmp_path),))).shards) == 2


@pytest.mark.parametrize("name", ["x.parquet", "x.jsonl.gz", "x.jsonl.zst"])
def test_an_empty_file_is_named(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"")
    message = refusal(parquet(tmp_path / "good.parquet"), tmp_path / name)
    assert message.startswith(f"{tmp_path / name}: the file is empty")


def _without_footer() -> bytes:
    sink = io.BytesIO()
    pq.write_table(pa.table({"prompt": ["x"] * 100}), sink)
    return sink.getvalue()[:-20]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("killed.parquet", _without_footer()),
        ("text.parquet", b"prompt,answer\n" * 3),
        ("cut.jsonl.gz", gzip.compress(random.Random(1).randbytes(5000))[:-900]),
        ("plain.jsonl.gz", b'{"prompt": "x"}\n'),
        ("cut.jsonl.zst", pa.compress(b'{"prompt": "x"}\n' * 9, codec="zstd", asbytes=True)[:-5]),
        ("plain.jsonl.zst", b'{"prompt": "x"}\n'),
    ],
)
def test_a_corrupt_file_is_named_before_any_work(tmp_path: Path, name: str, content: bytes) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    message = refusal(parquet(tmp_path / "good.parquet"), path)
    assert message.startswith(f"{path}: cannot be read (")


def test_a_file_without_a_readable_line_quotes_the_first_fault(tmp_path: Path) -> None:
    message = refusal(lines(tmp_path / "x.jsonl", "", "prompt,answer", "a,b"))
    assert "x.jsonl: line 2: invalid JSON" in message
    assert "no line is readable" in message


def test_rows_without_columns_are_refused(tmp_path: Path) -> None:
    assert "have no columns" in refusal(lines(tmp_path / "x.jsonl", "{}", "{}"))


# ---- fingerprints


@pytest.mark.parametrize("suffix", ["parquet", "jsonl", "jsonl.gz", "jsonl.zst"])
def test_local_fingerprint_is_that_of_the_bytes(tmp_path: Path, suffix: str) -> None:
    def write(path: Path, text: str) -> str:
        plain = f'{{"prompt": "{text}"}}\n'.encode() * 1000
        packed = {"gz": gzip.compress(plain, mtime=0), "zst": pa.compress(plain, codec="zstd", asbytes=True)}
        path.parent.mkdir(exist_ok=True)
        if suffix == "parquet":
            pq.write_table(pa.table({"prompt": [text] * 1000}), path)
        else:
            path.write_bytes(packed.get(suffix.rpartition(".")[2], plain))
        return found(path).shards[0].fingerprint

    here = write(tmp_path / f"a.{suffix}", "one")
    expected = hashlib.blake2b((tmp_path / f"a.{suffix}").read_bytes(), digest_size=16).hexdigest()
    assert here == f"blake2b-{expected}"
    assert write(tmp_path / "moved" / f"b.{suffix}", "one") == here
    assert write(tmp_path / f"a.{suffix}", "two") != here


def test_remote_parquet_fingerprint_follows_the_content() -> None:
    sinks = {name: io.BytesIO() for name in ("one", "two")}
    for name, sink in sinks.items():
        pq.write_table(pa.table({"prompt": [name]}), sink)
    fs = fsspec.filesystem("memory")
    fs.pipe("/fingerprints/a.parquet", sinks["one"].getvalue())
    before = found("memory://fingerprints/a.parquet").shards[0].fingerprint
    assert found("memory://fingerprints/a.parquet").shards[0].fingerprint == before
    fs.pipe("/fingerprints/a.parquet", sinks["two"].getvalue())
    assert found("memory://fingerprints/a.parquet").shards[0].fingerprint != before


# ---- URLs


def test_memory_urls_as_file_directory_and_glob() -> None:
    fs = fsspec.filesystem("memory")
    sink = io.BytesIO()
    pq.write_table(pa.table({"prompt": ["p"]}), sink)
    fs.pipe("/urls/b.parquet", sink.getvalue())
    fs.pipe("/urls/a.jsonl", b'{"prompt": "q"}\n{"prompt": "r"}\n')
    fs.pipe("/urls/_c.jsonl", b'{"prompt": "q"}\n')
    assert [s.uri for s in found("memory://urls/b.parquet").shards] == ["memory:///urls/b.parquet"]
    for argument in ("memory://urls", "memory://urls/*"):
        shard_set = found(argument)
        assert [(s.uri, s.num_rows) for s in shard_set.shards] == [
            ("memory:///urls/a.jsonl", 2),
            ("memory:///urls/b.parquet", 1),
        ]
        assert [uri for uri, _ in shard_set.skipped] == ["memory:///urls/_c.jsonl"]


@pytest.mark.parametrize(("url", "module", "extra"), [("s3://b/x", "s3fs", "s3"), ("gs://b/x", "gcsfs", "gs")])
def test_a_missing_extra_is_named(url: str, module: str, extra: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, module, None)  # as if not installed
    assert refusal(url) == f"{url}: support for this kind of URL is not installed: pip install 'batchinfer[{extra}]'"


def test_an_unknown_scheme_is_named() -> None:
    assert "nosuch://x: Protocol not known: nosuch" in refusal("nosuch://x")


# ---- directories saved by `datasets`, and the hub


def saved(path: Path, rows: int, shards: int = 1) -> Path:
    datasets.Dataset.from_dict({"prompt": [f"p{i}" for i in range(rows)]}).save_to_disk(str(path), num_shards=shards)
    return path


def test_saved_dataset_is_one_shard_an_arrow_file(tmp_path: Path) -> None:
    shard_set = found(saved(tmp_path / "ds", 25, shards=2))
    assert [(s.format, s.num_rows) for s in shard_set.shards] == [("dataset", 13), ("dataset", 12)]
    assert names(shard_set) == ["data-00000-of-00002.arrow", "data-00001-of-00002.arrow"]
    assert b"huggingface" in shard_set.shards[0].schema.metadata
    copy = found(saved(tmp_path / "copy", 25, shards=2))
    assert [s.fingerprint for s in copy.shards] == [s.fingerprint for s in shard_set.shards]
    assert names(found(tmp_path / "*")) == names(copy) + names(shard_set)


def test_dataset_dict_of_several_splits_asks_for_one(tmp_path: Path) -> None:
    split = datasets.Dataset.from_dict({"prompt": ["x"]})
    datasets.DatasetDict({"train": split, "test": split}).save_to_disk(str(tmp_path / "dd"))
    message = refusal(tmp_path / "dd")
    assert f"{tmp_path}/dd/train, {tmp_path}/dd/test" in message
    assert found(tmp_path / "dd" / "test").num_rows == 1
    datasets.DatasetDict({"train": split}).save_to_disk(str(tmp_path / "single"))
    assert found(tmp_path / "single").num_rows == 1


def test_broken_dataset_directories_are_named(tmp_path: Path) -> None:
    path = saved(tmp_path / "ds", 3)
    (path / "state.json").write_text("{}")
    assert "not a directory that `datasets` can load" in refusal(path)
    (path / "state.json").write_text("{")
    assert f"{path}/state.json: cannot be read" in refusal(path)
    arrow = saved(path, 3) / "data-00000-of-00001.arrow"
    arrow.write_bytes(b"x" * 100)
    assert refusal(path).startswith(f"{arrow}: cannot be read (")


def test_hub_split_is_read_from_the_cache_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    local = datasets.load_from_disk(str(saved(tmp_path / "ds", 4)))
    asked: list[Any] = []

    def load(name: str, config: str | None, split: str) -> Any:
        asked.append((name, config, split))
        if split == "nosuch":
            raise ValueError("Unknown split \"nosuch\". Should be one of ['train'].\nmore")
        return local

    monkeypatch.setattr("batchinfer.data.saved_dataset.check_hub", lambda text: None)
    monkeypatch.setattr(datasets, "load_dataset", load)
    assert [(s.format, s.num_rows) for s in found("hf://datasets/o/n:train").shards] == [("dataset", 4)]
    assert found("hf://datasets/n:main:test").num_rows == 4
    assert asked == [("o/n", None, "train"), ("n", "main", "test")]
    assert "hf://datasets/o/n:nosuch: cannot be loaded (Unknown split" in refusal("hf://datasets/o/n:nosuch")


def test_hub_without_network_fails_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    class Session:
        def head(self, url: str, timeout: float) -> None:
            asked.append((url, timeout))
            raise OSError("Name or service not known")

    monkeypatch.setattr("huggingface_hub.utils.get_session", lambda: Session())
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    for text in ("hf://datasets/o/n:train", "hf://datasets/o/n/data/x.parquet"):
        message = refusal(text)
        assert message.startswith(f"{text}: ")
        assert "cannot be reached (Name or service not known)" in message
    assert len(asked) == 2
    assert all(timeout <= 10 for _, timeout in asked)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    check_hub("hf://datasets/o/n:train")
    assert len(asked) == 2


def test_what_counts_as_a_hub_split() -> None:
    assert is_hub_split("hf://datasets/gsm8k:train")
    assert is_hub_split("hf://datasets/openai/gsm8k:main:test")
    for text in ("hf://datasets/o/n/x.parquet", "hf://datasets/o/n@main/x.parquet", "hf://datasets/o/n:train[:9]"):
        assert not is_hub_split(text)


# ---- types on their way to the output


def arrow_dataset(path: Path, array: pa.Array, name: str = "c") -> Path:
    """What `datasets` keeps, but of a type that its own writer may not make."""
    path.mkdir()
    table = pa.table({"prompt": ["x"] * len(array), name: array})
    with pa.OSFile(str(path / "data.arrow"), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    (path / "state.json").write_text('{"_data_files": [{"filename": "data.arrow"}]}')
    return path


@pytest.mark.parametrize(
    "array",
    [
        pa.array([(1, 2, 3)], pa.month_day_nano_interval()),
        pa.array([{}], pa.struct([])),
        pa.array([[{}]], pa.list_(pa.struct([]))),
        pa.UnionArray.from_dense(pa.array([0], pa.int8()), pa.array([0], pa.int32()), [pa.array([5])]),
        pa.RunEndEncodedArray.from_arrays([1], ["x"]),
        pa.DictionaryArray.from_arrays(pa.array([0], pa.int8()), pa.array([["x"]])),
    ],
    ids=["interval", "empty struct", "nested empty struct", "union", "run ends", "nested dictionary"],
)
def test_a_type_that_parquet_cannot_hold_is_found_before_inference(tmp_path: Path, array: pa.Array) -> None:
    message = refusal(arrow_dataset(tmp_path / "ds", array, name="when"))
    assert message.startswith(f"{tmp_path}/ds/data.arrow: column 'when' has type {array.type}")
    assert "cast the column or leave it out" in message


def test_a_column_name_that_occurs_twice_is_refused(tmp_path: Path) -> None:
    pq.write_table(pa.Table.from_arrays([pa.array([1]), pa.array([2])], names=["a", "a"]), tmp_path / "x.parquet")
    assert "the column name 'a' occurs twice" in refusal(tmp_path / "x.parquet")


def test_discovery_loads_neither_torch_nor_pandas(tmp_path: Path) -> None:
    path = parquet(tmp_path / "a.parquet")
    code = (
        "import sys; from batchinfer.config import InputConfig; from batchinfer.data.shards import discover;"
        "from batchinfer.data.readers import iter_rows;"
        f"list(iter_rows(discover(InputConfig(input=({str(path)!r},))).shards[0], 0, None));"
        "print([m for m in ('torch', 'pandas', 'datasets', 'transformers', 'pyarrow.dataset') if m in sys.modules])"
    )
    import subprocess

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_an_unexpected_fault_of_a_remote_store_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    fs = SimpleNamespace(protocol="memory", unstrip_protocol=lambda path: f"memory://{path}")

    def fail(path: str) -> bool:
        raise RuntimeError("no credentials\nTraceback ...")

    fs.isfile = fail
    monkeypatch.setattr(fsspec.core, "url_to_fs", lambda text: (fs, "/x.parquet"))
    assert refusal("memory://x.parquet").startswith("memory:///x.parquet: cannot be read (no credentials): check")


@pytest.mark.skipif(sys.platform == "darwin", reason="its file systems refuse such names")
def test_a_parquet_file_whose_name_is_not_utf8_is_read(tmp_path: Path) -> None:
    path = parquet(tmp_path / "a.parquet", rows=3)
    named = os.fsencode(tmp_path) + b"/caf\xe9.parquet"
    path.rename(os.fsdecode(named))
    assert found(os.fsdecode(named)).num_rows == 3


def test_an_empty_input_is_not_the_current_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parquet(tmp_path / "a.parquet")
    monkeypatch.chdir(tmp_path)
    assert "--input is empty" in refusal("")
    assert found(".").num_rows == 2
