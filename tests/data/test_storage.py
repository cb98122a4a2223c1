"""Whole files on local disk and on an object store."""

import errno
import os
from pathlib import Path

import pytest

from batchinfer.data.storage import Storage, open_storage
from batchinfer.errors import BatchInferError, UsageError


@pytest.fixture(params=["local", "memory"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Storage:
    uri = str(tmp_path / "root") if request.param == "local" else f"memory://{tmp_path.name}/root"
    return open_storage(uri, "work/tmp")


def test_files_and_folders(storage: Storage) -> None:
    assert storage.list() == []
    assert storage.size("a") is None
    storage.put("a", b"12345")
    storage.put("deep/er/b", b"x")
    storage.put("a", b"123")
    assert storage.read("a") == b"123"
    assert storage.size("a") == 3
    assert storage.exists("deep/er/b")
    assert not storage.exists("deep")
    assert storage.is_folder("deep")
    assert [name for name in storage.list() if name != "work"] == ["a", "deep"]
    assert storage.list("deep") == ["er"]
    storage.delete("a")
    storage.delete("a")
    with pytest.raises(FileNotFoundError):
        storage.read("a")
    storage.delete_folder("deep")
    storage.delete_folder("deep")
    assert not storage.exists("deep/er/b")


def test_a_file_appears_whole_or_not_at_all(storage: Storage) -> None:
    def write_half() -> None:
        with storage.create("a") as file:
            file.write(b"half")
            assert not storage.exists("a")
            raise RuntimeError("in the middle")

    with pytest.raises(RuntimeError, match="in the middle"):
        write_half()
    assert not storage.exists("a")
    with storage.create("a") as file:
        for _ in range(3):
            file.write(b"x" * (1 << 20))
        assert not storage.exists("a")
    assert storage.size("a") == 3 << 20
    assert storage.list("work/tmp") == []


@pytest.mark.parametrize(
    ("code", "advice"),
    [
        (errno.ENOSPC, "free some space"),
        (errno.EFBIG, "raise the limit on file sizes (ulimit -f)"),
        (errno.EROFS, "choose another --output"),
        (errno.EIO, "run the same command"),
    ],
)
def test_faults_name_the_path_and_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, advice: str
) -> None:
    def fail(descriptor: int) -> None:
        raise OSError(code, os.strerror(code))

    storage = open_storage(str(tmp_path), "tmp")
    storage.put("warm", b"")
    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(BatchInferError) as caught:
        storage.put("a", b"1")
    assert str(caught.value).startswith(f"cannot write {tmp_path}/a: {os.strerror(code)}; ")
    assert advice in str(caught.value)


def test_a_reading_fault_in_the_block_is_not_called_a_writing_fault(storage: Storage) -> None:
    def read_elsewhere() -> None:
        with storage.create("a"):
            Path("/nowhere/at/all").read_bytes()

    with pytest.raises(FileNotFoundError, match="/nowhere"):
        read_elsewhere()


def test_lock_names_its_holder_and_ends_with_release(tmp_path: Path) -> None:
    first, second = (open_storage(str(tmp_path), "tmp") for _ in range(2))
    lock = first.lock("work/lock")
    with pytest.raises(UsageError, match=f"process {os.getpid()} on {os.uname().nodename}"):
        second.lock("work/lock")
    first.delete_folder("work")
    lock.release()
    lock.release()
    second.lock("work/lock").release()


def test_lock_is_dropped_by_the_kernel_when_the_holder_is_killed(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        open_storage(str(tmp_path), "tmp").lock("lock")
        os.write(writer, b"held")
        os.read(os.pipe()[0], 1)
    os.read(reader, 4)
    storage = open_storage(str(tmp_path), "tmp")
    with pytest.raises(UsageError, match=f"process {pid}"):
        storage.lock("lock")
    os.kill(pid, 9)
    os.waitpid(pid, 0)
    storage.lock("lock").release()


def test_unknown_protocol() -> None:
    with pytest.raises(UsageError, match="nosuch"):
        open_storage("nosuch://bucket/x", "tmp")
