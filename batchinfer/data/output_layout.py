"""Where the files of an output stand, for a directory of parts and for a single file. Used by the writer and by those
who read an output back.

    OUTPUT/part-00000.parquet … _manifest.json _stats.json _SUCCESS      work in OUTPUT/_work/
    x.parquet x.parquet.stats.json x.parquet.manifest.json               work in x.parquet.work/

The mark of a finished job is written last: _SUCCESS, or the manifest beside a single file.
"""

import re
from dataclasses import dataclass
from typing import Literal

from batchinfer.errors import UsageError

FileFormat = Literal["parquet", "jsonl"]
PART_NAME = re.compile(r"part-(\d{5,})\.parquet")
_FILE_SUFFIXES: dict[str, tuple[FileFormat, str | None]] = {
    ".parquet": ("parquet", None),
    ".jsonl": ("jsonl", None),
    ".jsonl.gz": ("jsonl", "gzip"),
    ".jsonl.zst": ("jsonl", "zstd"),
}
_OTHER_SUFFIXES = (".json", ".csv", ".tsv", ".txt", ".arrow", ".feather", ".avro", ".orc", ".xlsx", ".gz", ".zst")


@dataclass(frozen=True, slots=True)
class OutputLayout:
    """Names relative to `root`, the folder that holds them all."""

    target: str  # as the user gave it
    root: str
    file: str | None  # the single file, None for a directory
    file_format: FileFormat
    compression: str | None
    work: str
    parts: str  # folder of the parts, with a slash unless it is the root
    manifest: str
    stats: str
    mark: str

    @classmethod
    def of(cls, target: str) -> "OutputLayout":
        """UsageError for a file of a format that is not written."""
        folder, _, name = target.rstrip("/").rpartition("/")
        for suffix, (file_format, compression) in _FILE_SUFFIXES.items():
            if name.endswith(suffix) and not target.endswith("/"):
                root = folder or ("/" if target.startswith("/") else ".")
                return cls._file(target, root, name, file_format, compression)
        if name.endswith(_OTHER_SUFFIXES) and not target.endswith("/"):
            raise UsageError(f"--output {target}: a single file is .parquet or .jsonl[.gz|.zst]; else give a directory")
        names = ("_manifest.json", "_stats.json", "_SUCCESS")
        return cls(target, target.rstrip("/") or "/", None, "parquet", None, "_work", "", *names)

    @classmethod
    def _file(
        cls, target: str, root: str, name: str, file_format: FileFormat, compression: str | None
    ) -> "OutputLayout":
        manifest, work = f"{name}.manifest.json", f"{name}.work"
        return cls(
            target, root, name, file_format, compression, work, f"{work}/", manifest, f"{name}.stats.json", manifest
        )

    @property
    def scratch(self) -> str:
        return f"{self.work}/tmp"

    @property
    def job(self) -> str:
        return f"{self.work}/job.json"

    @property
    def lock(self) -> str:
        return f"{self.work}/lock"

    @property
    def report(self) -> str:
        """The page that `batchinfer report` makes of a finished job, where it is not told another place."""
        return f"{self.file}.report.html" if self.file else "_report.html"

    @property
    def report_plots(self) -> str:
        """As `report`, the folder of its plots."""
        return f"{self.file}.report" if self.file else "_report"

    def journal(self, job_id: str) -> str:
        return f"{self.work}/journal-{job_id}"

    def part(self, name: str) -> str:
        return f"{self.parts}{name}"
