"""Where the figures and remarks of a command go: to files that are checked before its work and replaced whole after it,
and to stderr. Used by the commands."""

import errno
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, TextIO

import click

_OPEN_ALREADY = ("/dev", "/dev/fd", "/proc/self/fd")  # folders of what leads to files that others have open
_REASONS = {
    errno.EISDIR: "it is a directory; give a file",
    errno.ENOTDIR: "its folder is none; choose another place",
    errno.ENOENT: "there is no such folder; make it or choose another place",
    errno.EACCES: "this user may not write there; choose another place",
    errno.EPERM: "this user may not write there; choose another place",
    errno.EROFS: "the file system is read-only; choose another place",
}


class ResultFile:
    """A text file that a command writes at its end. What stands there stays until it is replaced at once; devices and
    pipes are written to as they are, and "-" is stdout. Raises OSError where it cannot be written."""

    def __init__(self, path: str) -> None:
        self._path = path if path == "-" else os.path.abspath(os.path.expanduser(path))
        is_new, is_plain = not os.path.exists(self._path), os.path.isfile(self._path)
        is_open_already = path == "-" or os.path.dirname(self._path) in _OPEN_ALREADY
        self._is_whole = (is_new or is_plain) and not is_open_already
        if os.path.isdir(self._path):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
        if not is_new and not os.access(self._path, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
        if self._is_whole:
            self._path = os.path.realpath(self._path)
            with self._beside():  # which goes at once: whether its folder takes one
                pass

    def write_json(self, figures: Any) -> None:
        self.write(json.dumps(figures, indent=2) + "\n")

    def write(self, text: str) -> None:
        """Raises OSError naming the file."""
        try:
            if self._is_whole:
                self._replace(text)
            else:
                with click.open_file(self._path, "w", encoding="utf-8") as file:
                    file.write(text)
        except OSError as error:
            raise OSError(error.errno, error.strerror, self._path) from error

    def _replace(self, text: str) -> None:
        with self._beside() as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
            with suppress(FileNotFoundError):
                shutil.copymode(self._path, file.name)
            os.replace(file.name, self._path)

    @contextmanager
    def _beside(self) -> Iterator[TextIO]:
        """A new file in the same folder, which is gone at the end, unless it has been moved."""
        path = os.path.join(os.path.dirname(self._path), f".batchinfer-{os.getpid()}.tmp")
        with open(path, "x", encoding="utf-8") as file:
            try:
                yield file
            finally:
                with suppress(FileNotFoundError):
                    os.unlink(path)


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
