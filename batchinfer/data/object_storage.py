"""Whole files on an object store, through fsspec. Made by open_storage."""

import contextlib
import os
import tempfile
from collections.abc import Iterator
from typing import IO, BinaryIO

from batchinfer.data.storage import ANY_HINT, HINTS, Lock, Storage
from batchinfer.errors import BatchInferError, UsageError


class _NoLock:
    def release(self) -> None:
        pass


class ObjectStorage(Storage):
    """An fsspec file system without append and rename: a file is made on local disk and uploaded in one put. There is
    no lock: object stores have none that ends with its process, so two jobs must not be given one output."""

    def __init__(self, uri: str) -> None:
        import fsspec

        self.uri = uri.rstrip("/")
        try:
            self._fs, self._root = fsspec.core.url_to_fs(self.uri)
        except (ImportError, ValueError) as e:
            raise UsageError(f"cannot open {uri}: {e}") from e

    def _place(self, name: str) -> str:
        return f"{self._root.rstrip('/')}/{name}" if name else self._root

    @contextlib.contextmanager
    def create(self, name: str) -> Iterator[IO[bytes]]:
        with tempfile.TemporaryDirectory(prefix="batchinfer-") as folder:
            local = os.path.join(folder, "file")
            with open(local, "xb") as file:
                yield file
            with self._store_errors("write", name):
                self._fs.put_file(local, self._place(name))

    def open(self, name: str) -> BinaryIO:
        with self._store_errors("read", name):
            return self._fs.open(self._place(name), "rb")

    def size(self, name: str) -> int | None:
        with self._store_errors("read", name):
            try:
                info = self._fs.info(self._place(name))
            except FileNotFoundError:
                return None
            return int(info["size"]) if info["type"] == "file" else None

    def is_folder(self, name: str) -> bool:
        with self._store_errors("read", name):
            return bool(self._fs.isdir(self._place(name)))

    def list(self, folder: str = "") -> list[str]:
        place = self._place(folder).rstrip("/")
        with self._store_errors("read", folder):
            self._fs.invalidate_cache(place)
            try:
                found = self._fs.ls(place, detail=False)
            except (FileNotFoundError, NotADirectoryError):
                return []
        return sorted(str(f).rstrip("/").rsplit("/", 1)[-1] for f in found if str(f).rstrip("/") != place)

    def delete(self, name: str) -> None:
        with self._store_errors("delete", name), contextlib.suppress(FileNotFoundError):
            self._fs.rm_file(self._place(name))

    def delete_folder(self, folder: str) -> None:
        with self._store_errors("delete", folder), contextlib.suppress(FileNotFoundError):
            self._fs.rm(self._place(folder), recursive=True)

    def lock(self, name: str) -> Lock:
        return _NoLock()

    @contextlib.contextmanager
    def _store_errors(self, action: str, name: str) -> Iterator[None]:
        try:
            yield
        except (FileNotFoundError, BatchInferError):
            raise
        except Exception as e:  # each store's client has its own exceptions
            hint = HINTS.get(getattr(e, "errno", None) or 0, ANY_HINT)
            raise BatchInferError(f"cannot {action} {self.path(name)}: {' '.join(str(e).split())}; {hint}") from e
