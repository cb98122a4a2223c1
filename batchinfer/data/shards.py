"""Turns --input into the ordered set of shards. Called once at the start of a job; what cannot be read, or cannot be
passed on to the output, is found here, before any inference."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Literal

import pyarrow as pa

from batchinfer.config import InputConfig
from batchinfer.data.arrow_types import check_columns
from batchinfer.data.files import HashingFile, Location, fingerprint_file, locate, naming_faults
from batchinfer.data.jsonl import LineIndex, open_lines
from batchinfer.data.jsonl_schema import ColumnKinds, scan_lines
from batchinfer.data.parquet_input import inspect_parquet
from batchinfer.data.saved_dataset import (
    check_hub,
    hub_split_files,
    inspect_arrow,
    is_hub_split,
    is_saved_dataset,
    saved_dataset_files,
)
from batchinfer.errors import UsageError

Format = Literal["parquet", "jsonl", "dataset"]
_SUFFIXES: dict[str, Format] = {
    ".parquet": "parquet",
    **{stem + packed: "jsonl" for stem in (".jsonl", ".ndjson") for packed in ("", ".gz", ".zst")},
}
_KINDS = ".parquet or .jsonl (also .jsonl.gz, .jsonl.zst, .ndjson)"


@dataclass(frozen=True)
class Shard:
    """One input file. schema: as it is passed through to the output; JSON text columns are marked in the field's
    metadata. fingerprint: changes with the content. line_index: of a jsonl shard, to start reading in the middle."""

    index: int
    uri: str
    format: Format
    num_rows: int
    fingerprint: str
    schema: pa.Schema
    line_index: LineIndex | None = field(default=None, repr=False, compare=False)


@dataclass(frozen=True)
class ShardSet:
    """The input in order. skipped: (uri, reason) of files found in directories and globs that are not read, and of
    files without rows."""

    shards: tuple[Shard, ...]
    skipped: tuple[tuple[str, str], ...]

    @property
    def num_rows(self) -> int:
        return sum(shard.num_rows for shard in self.shards)


@dataclass(frozen=True)
class _Found:
    location: Location
    format: Format


@dataclass(frozen=True)
class _Inspected:
    found: _Found
    num_rows: int
    fingerprint: str
    schema: pa.Schema | None  # None: jsonl, whose schema is known when all are scanned
    line_index: LineIndex | None = None


def discover(config: InputConfig, output: str | None = None) -> ShardSet:
    """The shards of `config.input`: in the order given, and inside a directory or glob sorted by path.

    output: where the job writes; a single file there is none of the input that a directory or glob gives.
    Reads each file once, for its fingerprint and, of JSON Lines, for one schema over all of them. Raises UsageError
    naming the file: nothing found, no rows, an unreadable file, a column that Parquet output cannot repeat.
    """
    skipped: list[tuple[str, str]] = []
    found = [file for text in config.input for file in _without_output(text, _find(text, skipped), output, skipped)]
    _check_found(config, found, skipped)
    kinds = ColumnKinds()
    errors: list[str] = []
    inspected = [_inspect(file, kinds, errors) for file in found]
    if not any(file.num_rows for file in inspected):
        raise UsageError(
            f"--input {' '.join(config.input)}: no rows in {_count(len(found), 'file')}{_listing(skipped)}"
        )
    skipped += [(file.found.location.uri, "no rows") for file in inspected if file.num_rows == 0]
    return ShardSet(_make_shards([f for f in inspected if f.num_rows], kinds.schema(), errors), tuple(skipped))


def _make_shards(files: list[_Inspected], json_schema: pa.Schema, errors: list[str]) -> tuple[Shard, ...]:
    if errors and not json_schema.names:
        raise UsageError(f"{errors[0]}: no line is readable: each must be a JSON object on a line of its own")
    shards = []
    for index, file in enumerate(files):
        uri, schema = file.found.location.uri, json_schema if file.schema is None else file.schema
        if not schema.names:
            raise UsageError(f"{uri}: the rows have no columns: give at least one that holds the prompt")
        check_columns(schema, uri)
        shards.append(Shard(index, uri, file.found.format, file.num_rows, file.fingerprint, schema, file.line_index))
    return tuple(shards)


def _check_found(config: InputConfig, found: list[_Found], skipped: list[tuple[str, str]]) -> None:
    if not config.input:
        raise UsageError("--input is missing: name a file, directory, glob or URL of .parquet or .jsonl shards")
    if not found:
        raise UsageError(f"--input {' '.join(config.input)}: no {_KINDS} file found{_listing(skipped)}")
    seen: set[str] = set()
    for file in found:
        uri = file.location.uri
        if uri in seen:
            raise UsageError(f"{uri}: found twice through --input {' '.join(config.input)}: name each file once")
        seen.add(uri)


def _listing(skipped: list[tuple[str, str]]) -> str:
    """The skipped files, the first few by name."""
    if not skipped:
        return ""
    shown = ", ".join(f"{uri} ({reason})" for uri, reason in skipped[:3])
    more = f" and {len(skipped) - 3} more" if len(skipped) > 3 else ""
    return f"; skipped {shown}{more}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _find(text: str, skipped: list[tuple[str, str]]) -> list[_Found]:
    """The files that one --input names."""
    if not text:
        raise UsageError("--input is empty: name a file, directory, glob or URL (`.` is the current directory)")
    if is_hub_split(text):
        return [_Found(location, "dataset") for location in hub_split_files(text)]
    if text.startswith("hf://"):
        check_hub(text)
    location = locate(text)
    with naming_faults(location.uri, UsageError, "check the path and the rights to it"):
        if location.is_file():
            return [_Found(location, _explicit_format(location))]
        if location.is_directory():
            return _find_in_directory(location, skipped)
        if any(character in location.path for character in "*?["):
            return list(_readable(location.matches(), _glob_root(location.path), _named_hidden(location.path), skipped))
    raise UsageError(f"--input {text}: no such file or directory")


def _without_output(text: str, found: list[_Found], output: str | None, skipped: list[tuple[str, str]]) -> list[_Found]:
    uri = locate(output).uri if output else None
    if text == output or uri not in [file.location.uri for file in found]:
        return found
    skipped.append((str(uri), "the output of this job"))
    return [file for file in found if file.location.uri != uri]


def _explicit_format(location: Location) -> Format:
    file_format = _format_of(location.name)
    if file_format is None:
        raise UsageError(
            f"{location.uri}: cannot tell the format: the name must end in {_KINDS}; "
            f"a file with one JSON object a line can be renamed to .jsonl"
        )
    return file_format


def _format_of(name: str) -> Format | None:
    return next((kind for suffix, kind in _SUFFIXES.items() if name.lower().endswith(suffix)), None)


def _find_in_directory(directory: Location, skipped: list[tuple[str, str]]) -> list[_Found]:
    """Not recursive: the output of an earlier job may lie in a subdirectory."""
    if is_saved_dataset(directory):
        return _dataset_files(directory)
    return list(_readable(directory.children(), directory.path, False, skipped))


def _dataset_files(directory: Location) -> list[_Found]:
    return [_Found(location, "dataset") for location in saved_dataset_files(directory)]


def _readable(
    locations: list[Location], root: str, hidden_too: bool, skipped: list[tuple[str, str]]
) -> Iterator[_Found]:
    """The shards among what a directory or glob gave; the others go to `skipped` with the reason."""
    for location in locations:
        parts = location.path[len(root) :].split("/")
        file_format = _format_of(location.name)
        if not hidden_too and any(part.startswith(("_", ".")) for part in parts):
            skipped.append((location.uri, "its name begins with _ or .; name it by itself to read it"))
        elif location.is_directory():
            if is_saved_dataset(location):
                yield from _dataset_files(location)
            else:
                skipped.append((location.uri, "a subdirectory; name it by itself to read it"))
        elif file_format is None:
            skipped.append((location.uri, "not .parquet or .jsonl"))
        else:
            yield _Found(location, file_format)


def _glob_root(pattern: str) -> str:
    """The directory part before the first wildcard: what lies above it was named by the user."""
    first = min(pattern.find(character) % (len(pattern) + 1) for character in "*?[")
    return pattern[: pattern.rfind("/", 0, first) + 1]


def _named_hidden(pattern: str) -> bool:
    """The pattern itself asks for names that begin with _ or a dot."""
    return pattern.rpartition("/")[2].startswith(("_", "."))


def _inspect(found: _Found, kinds: ColumnKinds, errors: list[str]) -> _Inspected:
    location = found.location
    with naming_faults(location.uri, UsageError, "it may be cut short or of another format; write it again"):
        may_be_empty = found.format == "jsonl" and not location.name.endswith((".gz", ".zst"))
        if location.size_bytes() == 0 and not may_be_empty:
            raise UsageError(f"{location.uri}: the file is empty (0 bytes): write it again or leave it out")
        if found.format == "jsonl":
            return _inspect_jsonl(found, kinds, errors)
        inspect: Callable[[Location], tuple[pa.Schema, int]]
        inspect = inspect_parquet if found.format == "parquet" else inspect_arrow
        schema, num_rows = inspect(location)
        return _Inspected(found, num_rows, fingerprint_file(location), schema)


def _inspect_jsonl(found: _Found, kinds: ColumnKinds, errors: list[str]) -> _Inspected:
    location = found.location
    with location.open() as raw:
        hashing = HashingFile(raw)
        with open_lines(hashing, location.name) as stream:
            num_rows, line_index, first_error = scan_lines(stream, kinds)
            fingerprint = hashing.fingerprint()
    if first_error:
        errors.append(f"{location.uri}: {first_error}")
    return _Inspected(found, num_rows, fingerprint, None, line_index)
