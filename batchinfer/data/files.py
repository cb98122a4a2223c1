"""Where input bytes come from: local paths and fsspec URLs, listed, opened and hashed. Used by the readers and by
shard discovery; every fault becomes one line naming the file."""

import contextlib
import glob
import hashlib
import io
import os
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import pyarrow as pa

from batchinfer.errors import BatchInferError, UsageError, first_line

_EXTRAS = {"s3": "s3", "s3a": "s3", "gs": "gs", "gcs": "gs"}  # URL scheme -> extra of this package
_CONTENT_KEYS = ("ETag", "etag", "md5Hash", "content_md5", "blob_id")  # what object stores call a content's identity
_BLOCK_BYTES = 1 << 20
_FAULTS = (OSError, EOFError, zlib.error, pa.ArrowException, UnicodeDecodeError)


@dataclass(frozen=True)
class Location:
    """A path on a file system. uri: the absolute path of a local file, the URL of a remote one."""

    fs: Any  # fsspec.AbstractFileSystem
    path: str
    is_local: bool

    @property
    def uri(self) -> str:
        return self.path if self.is_local else str(self.fs.unstrip_protocol(self.path))

    @property
    def name(self) -> str:
        return self.path.rstrip("/").rpartition("/")[2]

    def at(self, path: str) -> "Location":
        """Another path on the same file system."""
        return Location(self.fs, path, self.is_local)

    def child(self, name: str) -> "Location":
        return self.at(f"{self.path.rstrip('/')}/{name}")

    def is_file(self) -> bool:
        return bool(self.fs.isfile(self.path))

    def is_directory(self) -> bool:
        return bool(self.fs.isdir(self.path))

    def size_bytes(self) -> int:
        return int(self.fs.size(self.path))

    def children(self) -> list["Location"]:
        """What a directory holds, sorted by path."""
        names = (str(entry).rstrip("/") for entry in self.fs.ls(self.path, detail=False))
        return [self.at(name) for name in sorted(names) if name != self.path.rstrip("/")]

    def matches(self) -> list["Location"]:
        """What the path matches when read as a glob, sorted by path."""
        found = glob.glob(self.path, recursive=True, include_hidden=True) if self.is_local else self.fs.glob(self.path)
        return [self.at(str(path).rstrip("/")) for path in sorted(found)]

    def open(self) -> IO[bytes]:
        """The bytes, seekable; unbuffered where local."""
        return open(self.path, "rb", buffering=0) if self.is_local else self.fs.open(self.path, "rb")


def locate(text: str) -> Location:
    """Resolves a local path or an fsspec URL. Raises UsageError for an unknown scheme or a missing extra."""
    import fsspec

    if "://" not in text:
        from fsspec.implementations.local import LocalFileSystem

        return Location(LocalFileSystem(), os.path.abspath(os.path.expanduser(text)), is_local=True)
    try:
        fs, path = fsspec.core.url_to_fs(text)
    except ImportError as error:
        raise UsageError(f"{text}: {_install_advice(text, error)}") from error
    except ValueError as error:
        raise UsageError(f"{text}: {first_line(error)}; give a local path or a URL that fsspec reads") from error
    protocols = (fs.protocol,) if isinstance(fs.protocol, str) else fs.protocol
    return Location(fs, path, is_local="file" in protocols)


def _install_advice(text: str, error: ImportError) -> str:
    extra = _EXTRAS.get(text.partition("://")[0])
    if extra:
        return f"support for this kind of URL is not installed: pip install 'batchinfer[{extra}]'"
    return f"support for this kind of URL is not installed: {first_line(error)}"


@contextlib.contextmanager
def naming_faults(uri: str, error_class: type[BatchInferError], advice: str) -> Iterator[None]:
    """Turns whatever goes wrong while `uri` is read into one line: the file, the reason, what to do.

    Remote file systems raise what they like, so there every exception counts as the file's; locally a fault of ours
    stays a traceback.
    """
    faults: tuple[type[Exception], ...] = (Exception,) if "://" in uri else _FAULTS
    try:
        yield
    except BatchInferError:
        raise
    except faults as error:
        raise error_class(f"{uri}: cannot be read ({first_line(error)}): {advice}") from error


def read_option_file(option: str, path: str) -> str:
    """The text of a local file that an option names. Raises UsageError naming both."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{option} {path}: cannot be read ({getattr(error, 'strerror', None) or error})") from error


def with_file_contents(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options with the text of template files in place of their names."""
    texts = dict(options)
    if options["chat_template"] is not None:
        texts["chat_template"] = read_option_file("--chat-template", options["chat_template"])
    if (options["template"] or "").startswith("@"):
        texts["template"] = read_option_file("--template", options["template"][1:])
    return texts


class HashingFile(io.RawIOBase):
    """A file that hashes what is read through it, so that one pass both reads and fingerprints."""

    def __init__(self, raw: Any) -> None:
        self._raw = raw
        self._hash = hashlib.blake2b(digest_size=16)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        size: int = self._raw.readinto(buffer)
        self._hash.update(memoryview(buffer)[:size])
        return size

    def fingerprint(self) -> str:
        """Of the whole content; reads to the end what nobody has read."""
        block = bytearray(_BLOCK_BYTES)
        while self.readinto(block):
            pass
        return "blake2b-" + self._hash.hexdigest()


def fingerprint_file(location: Location) -> str:
    """What changes whenever the content does. Local: a hash of the bytes, so that a moved file keeps it. Remote: the
    store's own tag of the content with the size, or fsspec's `ukey`, since hashing would download the file twice."""
    if location.is_local:
        with location.open() as raw:
            return HashingFile(raw).fingerprint()
    info = location.fs.info(location.path)
    tag = next((str(info[key]) for key in _CONTENT_KEYS if info.get(key)), None) or location.fs.ukey(location.path)
    return f"tag-{str(tag).strip(chr(34))}-{info.get('size')}"
