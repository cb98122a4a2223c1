"""Whole files in one folder, local or on an object store: a file is there entirely or not at all. Used by the journal,
the writer of parts and the manifest; nothing else in data/ writes."""

import contextlib
import errno
from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, BinaryIO, Protocol

from batchinfer.errors import BatchInferError

HINTS = {
    errno.ENOSPC: "free some space there, then run the same command again: finished rows are kept",
    errno.EDQUOT: "raise the quota or free some space, then run the same command again: finished rows are kept",
    errno.EFBIG: "raise the limit on file sizes (ulimit -f), then run the same command again: finished rows are kept",
    errno.EACCES: "make it writable for this user or choose another --output",
    errno.EPERM: "make it writable for this user or choose another --output",
    errno.EROFS: "the file system is read-only; choose another --output",
    **dict.fromkeys((errno.ENOTDIR, errno.ENOENT, errno.EEXIST, errno.ENAMETOOLONG), "choose another --output"),
}
ANY_HINT = "run the same command again to carry on: finished rows are kept"


class Lock(Protocol):
    """Held until release() or the end of the process, however it ends."""

    def release(self) -> None:
        """Let go; once let go, nothing."""


class Storage(ABC):
    """Files below `uri`, named by relative paths with forward slashes. Every fault of the device becomes a
    BatchInferError that names the path and says what to do; FileNotFoundError stays what it is on reading."""

    uri: str

    def path(self, name: str) -> str:
        """The file's full name, for messages."""
        return f"{self.uri}/{name}" if name else self.uri

    def put(self, name: str, data: Any) -> None:
        """Write a whole file (bytes or any buffer), replacing one of that name; durable on return."""
        with self.create(name) as file:
            file.write(data)

    def read(self, name: str) -> bytes:
        with self.open(name) as file:
            return file.read()

    @abstractmethod
    def create(self, name: str) -> "contextlib.AbstractContextManager[IO[bytes]]":
        """A file to write in sequence. It appears under its name, durable, when the block ends; an exception in the
        block leaves no trace."""

    @abstractmethod
    def open(self, name: str) -> BinaryIO:
        """A seekable file to read. FileNotFoundError where there is none."""

    @abstractmethod
    def size(self, name: str) -> int | None:
        """Size in bytes; None where there is no such file."""

    @abstractmethod
    def is_folder(self, name: str) -> bool: ...

    @abstractmethod
    def list(self, folder: str = "") -> list[str]:
        """Names of the files and folders directly in a folder, sorted; empty where there is no such folder."""

    @abstractmethod
    def delete(self, name: str) -> None:
        """Delete a file; no fault where there is none."""

    @abstractmethod
    def delete_folder(self, folder: str) -> None:
        """Delete a folder and all that is in it; no fault where there is none."""

    @abstractmethod
    def lock(self, name: str) -> Lock:
        """Take the lock file of that name. UsageError naming the holder where another process has it."""

    def exists(self, name: str) -> bool:
        return self.size(name) is not None


def open_storage(uri: str, scratch: str) -> Storage:
    """The folder `uri`: a local path, or an fsspec URL such as s3://bucket/folder.

    scratch: the folder below it for files being written; nobody else's, cleared by the owner at a restart.
    """
    from batchinfer.data.local_storage import LocalStorage
    from batchinfer.data.object_storage import ObjectStorage

    uri = uri.removeprefix("file://")
    return ObjectStorage(uri) if "://" in uri else LocalStorage(Path(uri).expanduser(), scratch)


@contextlib.contextmanager
def device_errors(action: str, path: str) -> Iterator[None]:
    """Turn faults of the device into a BatchInferError of one line."""
    try:
        yield
    except OSError as e:
        hint = HINTS.get(e.errno or 0, ANY_HINT)
        raise BatchInferError(f"cannot {action} {path}: {e.strerror or e}; {hint}") from e
