"""JSON Lines: cutting a file into lines, parsing one line, and the index that lets a reader start in the middle.
Called by the scan at discovery and by the row reader, so that both judge a line alike."""

import gzip
import io
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import IO, Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

MAX_LINE_BYTES = 256 << 20  # a longer line is an unreadable row; without a bound one stray file fills the memory
MAX_DEPTH = 200  # of nested brackets; the parser's own bound depends on how deep the caller's stack is
INDEX_STRIDE = 1024  # rows between two places of the index
_BUFFER_BYTES = 1 << 20
_BOM = b"\xef\xbb\xbf"
_decode = json.JSONDecoder().decode


class LineError(Exception):
    """A line that is no row of data; the message says why in a few words."""


class Line(NamedTuple):
    """number: counted from 1, blank lines included. offset: of its first byte in the decompressed stream."""

    number: int
    offset: int
    data: bytes


@dataclass(frozen=True)
class LineIndex:
    """Where row k * INDEX_STRIDE begins: its byte offset in the decompressed stream and its line number."""

    offsets: npt.NDArray[np.int64]  # [ceil(num_rows / INDEX_STRIDE)]
    numbers: npt.NDArray[np.int64]  # [ceil(num_rows / INDEX_STRIDE)]


def open_lines(raw: Any, name: str) -> IO[bytes]:
    """A buffered stream of the decompressed bytes; the compression (.gz, .zst, none) goes by the file's name."""
    if name.endswith(".gz"):
        raw = gzip.GzipFile(fileobj=io.BufferedReader(raw, _BUFFER_BYTES))
    elif name.endswith(".zst"):
        raw = pa.CompressedInputStream(raw, "zstd")
    return io.BufferedReader(raw, _BUFFER_BYTES)


def iter_lines(stream: IO[bytes], number: int = 1, offset: int = 0) -> Iterator[Line]:
    """The lines that are rows: blank ones are passed over, at the end of the file and elsewhere. The last line needs
    no line feed, and a byte order mark at the start of the file is dropped.

    number, offset: of the first line that the stream gives.
    """
    while data := stream.readline(MAX_LINE_BYTES + 1):
        size = len(data)
        if size > MAX_LINE_BYTES and not data.endswith(b"\n"):
            size += _skip_line(stream)
        if offset == 0:
            data = data.removeprefix(_BOM)
        if data and not data.isspace():
            yield Line(number, offset, data)
        offset += size
        number += 1


def _skip_line(stream: IO[bytes]) -> int:
    """Reads to the end of a line and gives the number of bytes."""
    size = 0
    while data := stream.readline(_BUFFER_BYTES):
        size += len(data)
        if data.endswith(b"\n"):
            break
    return size


def skip_to(stream: IO[bytes], raw: IO[bytes], offset: int, compressed: bool) -> None:
    """Moves a stream at its beginning forward to a byte offset of the decompressed data."""
    if not compressed:
        raw.seek(offset)  # nothing is buffered yet
        return
    while offset > 0:
        block = stream.read(min(offset, _BUFFER_BYTES))
        if not block:
            return
        offset -= len(block)


def parse_line(data: bytes) -> dict[str, Any]:
    """The row that a line holds. A name that occurs twice keeps its last value, as `json.loads` does.

    Raises LineError where the line is not one JSON object of text that Arrow can hold.
    """
    if len(data) > MAX_LINE_BYTES:
        raise LineError(f"the line is longer than {MAX_LINE_BYTES >> 20} MiB")
    try:
        row = _decode(str(data, "utf-8").rstrip("\r\n"))
    except UnicodeDecodeError as error:
        raise LineError(f"not UTF-8 (byte 0x{data[error.start]:02x} at position {error.start + 1})") from None
    except json.JSONDecodeError as error:
        raise LineError(f"invalid JSON ({error.msg} at character {error.pos + 1})") from None
    except RecursionError:
        raise LineError(f"nested more than {MAX_DEPTH} levels deep") from None
    except ValueError:  # int() refuses to read very many digits
        raise LineError("a number has too many digits") from None
    if not isinstance(row, dict):
        raise LineError(f"a JSON object is needed, this is {_kind(row)}")
    if data.count(b"[") + data.count(b"{") > MAX_DEPTH:
        _check_depth(row)
    if b"\\ud" in data or b"\\uD" in data:
        _check_surrogates(row)
    return row


def _kind(value: object) -> str:
    names = {list: "a list", str: "a string", bool: "true or false", type(None): "null"}
    return names.get(type(value), "a number")


def _check_depth(row: dict[str, Any]) -> None:
    level: list[Any] = [row]
    for _ in range(MAX_DEPTH):
        level = [
            child
            for value in level
            for child in (value.values() if isinstance(value, dict) else value)
            if isinstance(child, dict | list)
        ]
        if not level:
            return
    raise LineError(f"nested more than {MAX_DEPTH} levels deep")


def _check_surrogates(row: dict[str, Any]) -> None:
    """Half a surrogate pair is a legal JSON escape but no text; nested values keep it as an escape in JSON text."""
    for name, value in row.items():
        for text in (name, value):
            if isinstance(text, str) and not _is_text(text):
                shown = ascii(name)
                raise LineError(f"column {shown} holds half of a surrogate pair, which is no text")


def _is_text(value: str) -> bool:
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def json_text(value: Any) -> str | None:
    """A nested or mixed value as JSON text that `json.loads` reads back to the same value; None stays null."""
    if value is None:
        return None
    text = json.dumps(value, ensure_ascii=False)
    return text if _is_text(text) else json.dumps(value)


def error_message(line_number: int, error: LineError) -> str:
    return f"line {line_number}: {error}"
