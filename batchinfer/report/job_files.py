"""The figures and the manifest of a finished output, or one line that says why there are none. Used by write.py."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from batchinfer.data.files import locate
from batchinfer.data.manifest import JobManifest
from batchinfer.data.output_layout import PART_NAME, OutputLayout
from batchinfer.data.storage import Storage, open_storage
from batchinfer.errors import UsageError


@dataclass(frozen=True, slots=True)
class FinishedJob:
    """target: as the user gave it. stats: the content of _stats.json."""

    target: str
    layout: OutputLayout
    stats: Mapping[str, Any]
    manifest: JobManifest

    @property
    def name(self) -> str:
        """The last part of its path."""
        return locate(self.target).name

    def shard_uri(self, shard: int) -> str:
        """The input file that a shard's number in a request_id stands for."""
        return self.manifest.shards[shard].uri


def open_job(target: str) -> FinishedJob:
    """The output directory or single file at `target`. Raises UsageError where it is absent, unfinished, incomplete, or
    without the figures of its run."""
    location = locate(target)
    if not location.is_file() and not location.is_directory():
        raise UsageError(f"{target}: there is no such file or directory; give the --output of a finished job")
    if PART_NAME.fullmatch(location.name):
        raise UsageError(f"{target}: is one part of an output; give its directory")
    layout = OutputLayout.of(target)
    storage = open_storage(layout.root, layout.scratch)
    manifest = _manifest(storage, layout)
    for part in manifest.parts:
        if storage.size(part.name) != part.num_bytes:
            raise UsageError(f"{storage.path(part.name)}: is missing or not what the job wrote; {_RERUN}")
    return FinishedJob(target, layout, _stats(storage, layout), manifest)


def _manifest(storage: Storage, layout: OutputLayout) -> JobManifest:
    if not storage.exists(layout.mark):
        raise UsageError(
            f"{layout.target}: not a finished output of batchinfer ({layout.mark} is missing); give the --output of a "
            "finished job, or run the same `batchinfer run` again, which carries on"
        )
    try:
        return JobManifest.from_json(storage.read(layout.manifest))
    except (FileNotFoundError, ValueError) as error:
        raise UsageError(f"{storage.path(layout.manifest)}: is missing or damaged; {_RERUN}") from error


def _stats(storage: Storage, layout: OutputLayout) -> Mapping[str, Any]:
    path = storage.path(layout.stats)
    try:
        stats = json.loads(storage.read(layout.stats))
    except FileNotFoundError as error:
        raise UsageError(f"{path}: is missing, and with it the figures of the run; {_RERUN}") from error
    except ValueError as error:
        raise UsageError(f"{path}: is damaged ({error}); {_RERUN}") from error
    lacking = [name for name in ("timeline", "work", "machine") if name not in stats]
    if lacking:
        raise UsageError(f"{path}: lacks {lacking[0]!r}, as an earlier version of batchinfer wrote it; {_RERUN}")
    return dict(stats)


_RERUN = "answer the rows again with --overwrite"
