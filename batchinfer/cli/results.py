"""Where the figures and remarks of a command go: to files that are checked before its work and replaced whole after it,
and to stderr. Used by the commands."""

import errno
import fcntl
import json
import os
import re
import secrets
import stat
import sys
from contextlib import suppress
from typing import Any, TextIO, cast

import click

_MOST_LINKS = 40  # one after the other, as the kernel has it
_OWN_DESCRIPTORS = ("/proc/self/fd", "/dev/fd")  # folders
_NOT_REPLACEABLE = (errno.EACCES, errno.EPERM, errno.EROFS, errno.EBUSY, errno.EXDEV)
_REASONS = {
    errno.EISDIR: "it is a directory; give a file",
    errno.ENOTDIR: "its folder is none; choose another place",
    errno.ENOENT: "there is no such folder; make it or choose another place",
    errno.EACCES: "this user may not write there; choose another place",
    errno.EPERM: "this user may not write there; choose another place",
    errno.EROFS: "the file system is read-only; choose another place",
    errno.ENAMETOOLONG: "its name is too long; choose a shorter one",
    errno.EBADF: "this process has nothing open there that takes text; choose another place",
}


class ResultFile:
    """A text file that a command writes at its end. What stands there stays until it is replaced at once, or is written
    over where the file may be written and not be replaced, as in a folder of another user. Devices and pipes are
    written to as they are; "-" and paths of this process's descriptors (/dev/stdout) continue what is open there.
    Raises OSError where it cannot be written."""

    def __init__(self, path: str) -> None:
        self._path = path if path == "-" else os.path.abspath(os.path.expanduser(path))
        self._descriptor = None if path == "-" else _own_descriptor(self._path)
        if self._descriptor is not None and fcntl.fcntl(self._descriptor, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF), path)
        self._is_whole = path != "-" and self._descriptor is None and self._is_replaceable()

    @property
    def is_stdout(self) -> bool:
        return self._path == "-" or self._descriptor == 1

    def _is_replaceable(self) -> bool:
        """Else it may be written as it is. Raises OSError where it may not."""
        mode = _mode(self._path)
        if mode is not None:
            if stat.S_ISDIR(mode):
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), self._path)
            if not os.access(self._path, os.W_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), self._path)
            if not stat.S_ISREG(mode):
                return False
        self._path = os.path.realpath(self._path)
        try:
            file, name = self._beside(mode)
        except OSError as error:
            if mode is None or error.errno not in _NOT_REPLACEABLE:
                raise
            return False
        file.close()
        os.unlink(name)
        return True

    def write_json(self, figures: Any) -> None:
        self.write(json.dumps(figures, indent=2) + "\n")

    def write(self, text: str) -> None:
        """Raises OSError naming the file."""
        try:
            if not (self._is_whole and self._replace(text)):
                with self._as_it_is() as file:
                    file.write(text)
        except OSError as error:
            raise OSError(error.errno, error.strerror, self._path) from error

    def _replace(self, text: str) -> bool:
        """Whether it could be. False where it stands there as before, and can only be written over."""
        mode = _mode(self._path)
        try:
            file, name = self._beside(mode)
            try:
                with file:
                    if mode is not None:
                        os.fchmod(file.fileno(), stat.S_IMODE(mode))  # before anybody could read what is private
                    file.write(text)
                    file.flush()
                    os.fsync(file.fileno())
                os.replace(name, self._path)
            except BaseException:
                with suppress(FileNotFoundError):
                    os.unlink(name)
                raise
        except OSError as error:
            if mode is None or error.errno not in _NOT_REPLACEABLE:
                raise
            return False
        return True

    def _beside(self, mode: int | None) -> tuple[TextIO, str]:
        """A new file in the same folder, which only this user can read where it is to replace one of that mode; and its
        path."""
        name = os.path.join(os.path.dirname(self._path), f".batchinfer-{secrets.token_hex(8)}.tmp")
        descriptor = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666 if mode is None else 0o600)
        return open(descriptor, "w", encoding="utf-8"), name

    def _as_it_is(self) -> TextIO:
        if self._descriptor is not None:
            sys.stdout.flush()  # what was printed before stands before
            return open(os.dup(self._descriptor), "w", encoding="utf-8")
        if self._path == "-":
            return cast(TextIO, click.open_file("-", "w", encoding="utf-8"))
        return open(self._path, "w", encoding="utf-8", opener=_open_existing)


def _mode(path: str) -> int | None:
    """None where nothing is. Raises OSError where nothing could be."""
    try:
        return os.stat(path).st_mode
    except FileNotFoundError:
        return None


def _open_existing(path: str, flags: int) -> int:
    """In a folder with the sticky bit the kernel refuses O_CREAT for another user's file, which may yet be written."""
    return os.open(path, flags & ~os.O_CREAT)


def _own_descriptor(path: str) -> int | None:
    """The descriptor of this process that the path, or a link there, stands for. To open the file behind it once more
    would begin at its start, and to replace that file would leave the descriptor with a nameless one."""
    folders = {os.path.realpath(folder) for folder in _OWN_DESCRIPTORS}
    for _ in range(_MOST_LINKS):
        folder, name = os.path.split(path)
        if re.fullmatch("[0-9]{1,9}", name) and os.path.realpath(folder) in folders:
            return int(name)
        if not os.path.islink(path):
            return None
        path = os.path.normpath(os.path.join(os.path.realpath(folder), os.readlink(path)))
    return None


class _ResultFileType(click.ParamType):
    name = "file"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> ResultFile:
        """Before the command does anything."""
        try:
            return ResultFile(value)
        except OSError as error:
            reason = _REASONS.get(error.errno or 0, error.strerror or str(error))
            self.fail(f"cannot write {value}: {reason}", param, ctx)


RESULT_FILE = _ResultFileType()

json_option = click.option(
    "--json", "json_file", type=RESULT_FILE, metavar="FILE", help="Write the figures here as JSON."
)


def say(line: str) -> None:
    """A remark on what goes on."""
    click.echo(f"batchinfer: {line}", err=True)


def show(text: str, *files: ResultFile | None) -> None:
    """Prints what a person reads: on stderr where one of the files has stdout for itself."""
    click.echo(text, err=any(file is not None and file.is_stdout for file in files))
