"""Who may write an output: refuses columns that it cannot hold, finds what stands there, refuses what is another's or
another job's, takes the lock, and starts a job or carries one on. Called by the writer before anything else is done."""

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import pyarrow as pa
import pyarrow.parquet as pq

from batchinfer.data.manifest import JobManifest
from batchinfer.data.output_layout import PART_NAME, OutputLayout
from batchinfer.data.result_schema import require_no_clash
from batchinfer.data.shards import Shard
from batchinfer.data.single_file import common_schema
from batchinfer.data.storage import Lock, Storage
from batchinfer.errors import UsageError

JOB_ID_KEY = "batchinfer.job_id"  # in the metadata of each part
_OWN_BEFORE_START = {"lock", "tmp"}  # in the work folder of a job that was killed before it wrote job.json
_SHOWN_CHANGES = 5

# "unanswered": a job was started and has no answer yet, as where its options turned out not to fit the model.
State = Literal["absent", "unanswered", "unfinished", "finished", "incomplete", "foreign"]


@dataclass(frozen=True, slots=True)
class Claim:
    """The right to write. parts: output rows of the parts that are whole, by name."""

    storage: Storage
    layout: OutputLayout
    manifest: JobManifest
    lock: Lock
    is_resumed: bool
    parts: Mapping[str, int]


def check_output(target: str, shards: Sequence[Shard], appended: pa.Schema) -> OutputLayout:
    """Where the files of the output at `target` stand. appended: the columns of results. Raises UsageError for another
    format, for clashing column names and for columns that a single file cannot hold."""
    layout = OutputLayout.of(target)
    for shard in shards:
        require_no_clash(shard.schema, appended, shard.uri)
    if layout.file:
        common_schema(layout, [shard.schema for shard in shards])
    return layout


def claim_output(storage: Storage, layout: OutputLayout, now: JobManifest, overwrite: bool) -> Claim | JobManifest:
    """A Claim, or the manifest of the same job where it is finished. UsageError where the output is not to be touched:
    foreign files, another job (naming what differs), or a process that writes it."""
    state, found = find_job(storage, layout)
    if _decide(layout, state, found, now, overwrite) == "finished":
        _remove_leftovers(storage, layout)
        return _as_manifest(found)
    lock = storage.lock(layout.lock)
    try:
        state, found = find_job(storage, layout)  # again: until the lock was taken another process may have finished
        decision = _decide(layout, state, found, now, overwrite)
        if decision == "finished":
            storage.delete_folder(layout.work)
            lock.release()
            return _as_manifest(found)
        manifest = now
        if decision == "start":
            _start(storage, layout, manifest)
        else:
            manifest = replace(now, job_id=_as_manifest(found).job_id, kept=_as_manifest(found).kept)
        parts = _sweep(storage, layout, manifest.job_id)
        return Claim(storage, layout, manifest, lock, decision == "resume", parts)
    except BaseException:
        lock.release()
        raise


def _as_manifest(found: JobManifest | None) -> JobManifest:
    if found is None:
        raise AssertionError("a finished or unfinished job has a manifest")
    return found


def find_job(storage: Storage, layout: OutputLayout) -> tuple[State, JobManifest | None]:
    """What stands there, and of which job where that is known."""
    work, final = _load(storage, layout.job), _load(storage, layout.manifest)
    if final and storage.exists(layout.mark) and (work is None or work.job_id == final.job_id):
        whole = all(storage.size(part.name) == part.num_bytes for part in final.parts)
        return ("finished" if whole else "incomplete"), final
    if work:
        return ("unfinished" if _has_answers(storage, layout, work) else "unanswered"), work
    if final:
        return "incomplete", final
    return ("absent" if _is_free(storage, layout) else "foreign"), None


def _has_answers(storage: Storage, layout: OutputLayout, job: JobManifest) -> bool:
    """Whether rows are in the journal or in parts, which count whoever made them."""
    parts = (name for name in storage.list(layout.parts.rstrip("/")) if PART_NAME.fullmatch(name))
    return bool(storage.list(layout.journal(job.job_id))) or any(parts)


def _load(storage: Storage, name: str) -> JobManifest | None:
    try:
        return JobManifest.from_json(storage.read(name))
    except (FileNotFoundError, ValueError):
        return None


def _is_free(storage: Storage, layout: OutputLayout) -> bool:
    if not set(storage.list(layout.work)) <= _OWN_BEFORE_START:
        return False
    if layout.file:
        beside = (layout.file, layout.manifest, layout.stats)
        return not any(storage.exists(name) or storage.is_folder(name) for name in beside)
    return not storage.exists("") and set(storage.list()) <= {layout.work}


def _decide(
    layout: OutputLayout, state: State, found: JobManifest | None, now: JobManifest, overwrite: bool
) -> Literal["start", "resume", "finished"]:
    if state == "foreign":
        raise UsageError(f"{layout.target} exists and batchinfer did not make it; choose another --output")
    if state == "absent" or overwrite:
        return "start"
    changes = _as_manifest(found).changes(now)
    if changes and state == "unanswered":
        return "start"
    if changes:
        raise UsageError(f"{layout.target} {_refusal(_as_manifest(found), now, changes, state)}")
    if state == "incomplete":
        raise UsageError(f"{layout.target} is finished but files of it are missing; start afresh with --overwrite")
    return "finished" if state == "finished" else "resume"


def _refusal(found: JobManifest, now: JobManifest, changes: list[str], state: State) -> str:
    """Why an output that holds answers is not touched, and what to do."""
    more = len(changes) - _SHOWN_CHANGES
    shown = "; ".join(changes[:_SHOWN_CHANGES]) + (f"; and {more} more" if more > 0 else "")
    to_keep = "" if state == "finished" else "To carry that one on, run it as it was. "
    if found.differs_in_selection_only(now):
        return (
            f"answers another choice of these rows: {shown}. {to_keep}For this one add --overwrite, which answers its "
            "rows afresh in place of those (a row gets the same answer again), or give another --output"
        )
    return (
        f"belongs to another job: {shown}. {to_keep}For this one give another --output, or --overwrite, which deletes "
        "what is there"
    )


def _remove_leftovers(storage: Storage, layout: OutputLayout) -> None:
    """The work folder of a finished job that was killed while it removed it."""
    if storage.is_folder(layout.work):
        with contextlib.suppress(UsageError):  # another process is just removing it
            lock = storage.lock(layout.lock)
            storage.delete_folder(layout.work)
            lock.release()


def _start(storage: Storage, layout: OutputLayout, manifest: JobManifest) -> None:
    """Bind the output to the new job first; from then on a crash leaves files of the old one that are known as such."""
    storage.put(layout.job, manifest.to_json())
    for name in (layout.mark, layout.manifest, layout.stats, layout.file, layout.report):
        if name:
            storage.delete(name)
    storage.delete_folder(layout.report_plots)


def _sweep(storage: Storage, layout: OutputLayout, job_id: str) -> dict[str, int]:
    """Delete what earlier runs and jobs left behind; returns the parts of this job that are whole."""
    storage.delete_folder(layout.scratch)
    for name in storage.list(layout.work):
        if name.startswith("journal-") and f"{layout.work}/{name}" != layout.journal(job_id):
            storage.delete_folder(f"{layout.work}/{name}")
    whole = {}
    for name in storage.list(layout.parts.rstrip("/")):
        if not PART_NAME.fullmatch(name):
            continue
        owner, num_rows = inspect_part(storage, layout, name)
        if owner == job_id:
            whole[name] = num_rows
        else:
            storage.delete(layout.part(name))
    return whole


def inspect_part(storage: Storage, layout: OutputLayout, name: str) -> tuple[str, int]:
    """(id of the job that made a part, its output rows). UsageError where it is not a part of batchinfer."""
    try:
        with storage.open(layout.part(name)) as file:
            metadata = pq.read_metadata(file)
        return (metadata.metadata or {})[JOB_ID_KEY.encode()].decode(), metadata.num_rows
    except (pa.ArrowException, KeyError) as e:
        path = storage.path(layout.part(name))
        raise UsageError(f"{path} is damaged or batchinfer did not make it; move it away and run again") from e
