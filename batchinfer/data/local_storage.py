"""Whole files in a local folder: temporary name, fsync, rename, fsync of the folder. Made by open_storage."""

import contextlib
import fcntl
import io
import itertools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, BinaryIO

from batchinfer.data.storage import Lock, Storage, device_errors
from batchinfer.errors import BatchInferError, UsageError

_BUFFER_BYTES = 1 << 20


class _LocalFile(io.RawIOBase):
    """A file being written, whose faults name the place it is meant for."""

    def __init__(self, storage: "LocalStorage", descriptor: int, target: str) -> None:
        self._storage = storage
        self._descriptor = descriptor
        self._target = target
        self._size = 0
        self._waiting = bytearray()  # Parquet and Arrow write in many small pieces

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._size

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        self._waiting += view
        self._size += len(view)
        if len(self._waiting) >= _BUFFER_BYTES:
            self.write_out()
        return len(view)

    def write_out(self) -> None:
        """Hand what waits to the operating system."""
        with device_errors("write", self._target):
            self._storage._write(self._descriptor, memoryview(bytes(self._waiting)))
        self._waiting.clear()


class LocalStorage(Storage):
    """A local folder: temporary name in `scratch`, fsync, rename, fsync of the folder."""

    _numbers = itertools.count()

    def __init__(self, root: Path, scratch: str) -> None:
        self._root = root.absolute()
        self._scratch = scratch
        self.uri = str(root)

    @contextlib.contextmanager
    def create(self, name: str) -> Iterator[IO[bytes]]:
        target = self._root / name
        flat_name = name.replace("/", "+")
        temporary = self._root / self._scratch / f"{flat_name}.{os.getpid()}-{next(self._numbers)}.tmp"
        with device_errors("write", str(target)):
            self._make_folder(target.parent)
            self._make_folder(temporary.parent)
            descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        try:
            file = _LocalFile(self, descriptor, str(target))
            yield file  # type: ignore[misc]
            file.write_out()
            with device_errors("write", str(target)):
                self._sync(descriptor)
                self._rename(temporary, target)
                self._sync_folder(target.parent)
        except BaseException:
            with contextlib.suppress(OSError):
                self._unlink(temporary)
            raise
        finally:
            os.close(descriptor)

    def open(self, name: str) -> BinaryIO:
        path = self._root / name
        try:
            return open(path, "rb")
        except (FileNotFoundError, NotADirectoryError) as e:
            raise FileNotFoundError(str(path)) from e
        except OSError as e:
            raise BatchInferError(f"cannot read {path}: {e.strerror}; make it readable for this user") from e

    def size(self, name: str) -> int | None:
        path = self._root / name
        with device_errors("read", str(path)):
            return path.stat().st_size if path.is_file() else None

    def is_folder(self, name: str) -> bool:
        return (self._root / name).is_dir()

    def list(self, folder: str = "") -> list[str]:
        path = self._root / folder
        with device_errors("read", str(path)):
            return sorted(os.listdir(path)) if path.is_dir() else []

    def delete(self, name: str) -> None:
        path = self._root / name
        with device_errors("delete", str(path)):
            self._unlink(path)

    def delete_folder(self, folder: str) -> None:
        path = self._root / folder
        if not path.is_dir():
            return
        with device_errors("delete", str(path)):
            for parent, folders, files in os.walk(path, topdown=False):
                for file in sorted(files):
                    self._unlink(Path(parent, file))
                for child in folders:
                    self._rmdir(Path(parent, child))
            self._rmdir(path)
            self._sync_folder(path.parent)

    def lock(self, name: str) -> Lock:
        path = self._root / name
        with device_errors("write", str(path)):
            self._make_folder(path.parent)
            return _FileLock(path)

    # The operations on the device, one each, so that tests can fail every one of them.

    def _write(self, descriptor: int, data: memoryview) -> None:
        while data:
            data = data[os.write(descriptor, data) :]

    def _sync(self, descriptor: int) -> None:
        os.fsync(descriptor)

    def _rename(self, source: Path, target: Path) -> None:
        os.replace(source, target)

    def _sync_folder(self, folder: Path) -> None:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def _unlink(self, path: Path) -> None:
        path.unlink(missing_ok=True)

    def _rmdir(self, path: Path) -> None:
        path.rmdir()

    def _make_folder(self, folder: Path) -> None:
        if not folder.is_dir():
            self._make_folder(folder.parent)
            folder.mkdir(exist_ok=True)
            self._sync_folder(folder.parent)


class _FileLock:
    """flock, which the kernel drops when the process ends."""

    def __init__(self, path: Path) -> None:
        while True:
            self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
            try:
                fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                holder = os.read(self._descriptor, 200).decode(errors="replace").strip() or "another process"
                os.close(self._descriptor)
                raise UsageError(f"{path.parent} is in use by {holder}; wait for it or stop it") from None
            if self._is_at(path):
                break
            os.close(self._descriptor)  # the holder before us deleted the file while we opened it
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, f"process {os.getpid()} on {os.uname().nodename}\n".encode(), 0)

    def _is_at(self, path: Path) -> bool:
        try:
            return os.path.samestat(os.fstat(self._descriptor), path.stat())
        except FileNotFoundError:
            return False

    def release(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._descriptor = -1
