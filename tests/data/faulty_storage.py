"""A local folder whose n-th operation on the device fails: with an error, or as the death of the process at that
moment, after which nothing more happens on disk."""

import errno
import os
from pathlib import Path
from typing import Any, Literal

from batchinfer.data.local_storage import LocalStorage

Fault = Literal["error", "death", "power"]  # power: what was not synced is lost as well


class Died(BaseException):
    """The process ended here."""


class FaultyStorage(LocalStorage):
    def __init__(self, root: Path, scratch: str, fault: Fault, fail_at: int) -> None:
        super().__init__(root, scratch)
        self._fault, self._fail_at = fault, fail_at
        self.num_operations = 0
        self._dead = False
        self._unsynced: tuple[Path, Path, bytes | None] | None = None  # rename: source, target, what it replaced

    @property
    def has_failed(self) -> bool:
        return self.num_operations >= self._fail_at

    def _step(self) -> bool:
        """Counts an operation; True where it is the one to fail."""
        if self._dead:
            raise Died
        self.num_operations += 1
        return self.num_operations == self._fail_at

    def _fail(self) -> None:
        if self._fault == "error":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._dead = True
        if self._fault == "power" and self._unsynced:
            source, target, replaced = self._unsynced
            os.replace(target, source)
            if replaced is not None:
                target.write_bytes(replaced)
        raise Died

    def _write(self, descriptor: int, data: memoryview) -> None:
        if self._step():
            os.write(descriptor, data[: len(data) // 2])
            self._fail()
        super()._write(descriptor, data)

    def _sync(self, descriptor: int) -> None:
        if self._step():
            if self._fault == "power":
                os.ftruncate(descriptor, os.fstat(descriptor).st_size // 2)
            self._fail()
        super()._sync(descriptor)

    def _rename(self, source: Path, target: Path) -> None:
        if self._step():
            self._fail()
        self._unsynced = source, target, target.read_bytes() if target.exists() else None
        super()._rename(source, target)

    def _sync_folder(self, folder: Path) -> None:
        if self._step():
            self._fail()
        super()._sync_folder(folder)
        self._unsynced = None

    def _unlink(self, path: Path) -> None:
        if self._step():
            self._fail()
        super()._unlink(path)

    def _rmdir(self, path: Path) -> None:
        if self._step():
            self._fail()
        super()._rmdir(path)


def install(monkeypatch: Any, fault: Fault, fail_at: int) -> list[FaultyStorage]:
    """The next outputs are opened on such folders; they appear in the list returned."""
    made: list[FaultyStorage] = []

    def make(uri: str, scratch: str) -> FaultyStorage:
        made.append(FaultyStorage(Path(uri), scratch, fault, fail_at))
        return made[-1]

    monkeypatch.setattr("batchinfer.data.writer.open_storage", make)
    return made
