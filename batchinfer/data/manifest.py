"""What a job's output is bound to: its input, its model and the options that change answers or layout. Written when a
job starts and when it ends; compared before anything is done in an output that exists."""

import json
import math
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from batchinfer.config import iter_options
from batchinfer.options import shown

FORMAT = 1  # of the work folder: a journal of another format cannot be carried on
_STOOD_FOR = ("input", "model")  # options that the fingerprints of shards and model stand for
_MOST_CHARACTERS = 100  # of a value that is shown
_SELECTION = ("limit", "sample")  # options that choose rows


@dataclass(frozen=True, slots=True)
class ShardRecord:
    """An input shard as it was."""

    uri: str
    num_rows: int
    fingerprint: str


@dataclass(frozen=True, slots=True)
class PartRecord:
    """A finished file of the output."""

    name: str
    shard: int
    num_rows: int  # output rows
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class JobManifest:
    """The content of job.json and, with `parts`, of _manifest.json."""

    shards: tuple[ShardRecord, ...]
    model: str  # fingerprint
    options: Mapping[str, Any]  # JSON values
    job_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    format: int = FORMAT
    parts: tuple[PartRecord, ...] = ()
    kept: Mapping[str, Any] = field(default_factory=dict)  # what the first run chose and later ones take over

    @classmethod
    def make(cls, shards: Sequence[Any], model_fingerprint: str, options: Mapping[str, Any]) -> "JobManifest":
        """shards: with uri, num_rows and fingerprint. options: JobConfig.fingerprint_options(), with the content of
        files in place of their names."""
        records = tuple(ShardRecord(s.uri, s.num_rows, s.fingerprint) for s in shards)
        kept = {name: _json_value(value) for name, value in options.items() if name not in _STOOD_FOR}
        return cls(shards=records, model=model_fingerprint, options=kept)

    def to_json(self) -> bytes:
        return json.dumps(asdict(self), indent=1).encode()

    @classmethod
    def from_json(cls, data: bytes) -> "JobManifest":
        """ValueError where the data is not a manifest."""
        try:
            content = json.loads(data)
            shards = tuple(ShardRecord(**s) for s in content.pop("shards"))
            parts = tuple(PartRecord(**p) for p in content.pop("parts"))
            return cls(shards=shards, parts=parts, **content)
        except (KeyError, TypeError, AttributeError) as e:
            raise ValueError(f"not a manifest of batchinfer: {e}") from e

    def changes(self, now: "JobManifest") -> list[str]:
        """What differs in `now`, in words, options by their flags; empty where it is the same job."""
        changes = _shard_changes(self.shards, now.shards)
        if self.format != now.format:
            changes.append(f"the work folder has format {self.format}, this version writes {now.format}")
        if self.model != now.model:
            changes.append("the model changed")
        for name in sorted(self.options.keys() | now.options.keys()):
            was, value = self.options.get(name), now.options.get(name)
            if was != value:
                changes.append(_option_change(name, was, value))
        return changes

    def differs_in_selection_only(self, now: "JobManifest") -> bool:
        """Whether `now` is the same job but for --limit or --sample."""
        chosen = {name: now.options.get(name) for name in _SELECTION}
        return bool(self.changes(now)) and not replace(self, options={**self.options, **chosen}).changes(now)


def _json_value(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return json.loads(json.dumps(value))


def _option_change(name: str, was: Any, now: Any) -> str:
    """In words as on the command line."""
    flag, old, new = "--" + name.replace("_", "-"), _words(name, was), _words(name, now)
    return f"{flag} was {old}, now {new}" if old != new else f"the text of {flag} changed"  # a long one is cut


def _words(name: str, value: Any) -> str:
    if value is None or value in ([], ""):
        return "not given"
    member = next((member for _, member in iter_options() if member.name == name), None)
    if member is None:  # an option of another version
        return json.dumps(value, ensure_ascii=False)
    text = shown(member, tuple(value) if isinstance(value, list) else value)
    return text if len(text) <= _MOST_CHARACTERS else f"{text[:_MOST_CHARACTERS]}…"


def _shard_changes(was: Sequence[ShardRecord], now: Sequence[ShardRecord]) -> list[str]:
    old, new = [_content(s) for s in was], [_content(s) for s in now]
    if old == new:
        return []
    if sorted(old) == sorted(new):
        first = next(i for i in range(len(old)) if old[i] != new[i])
        return [f"the order of the shards changed: shard {first} was {was[first].uri}, now {now[first].uri}"]
    if [s.uri for s in was] == [s.uri for s in now]:
        return [_content_change(i, was[i], now[i]) for i in range(len(old)) if old[i] != new[i]]
    return [_set_change(was, now)]


def _content(shard: ShardRecord) -> tuple[str, int]:
    return shard.fingerprint, shard.num_rows


def _content_change(index: int, was: ShardRecord, now: ShardRecord) -> str:
    what = f"{was.num_rows} rows, now {now.num_rows}" if was.num_rows != now.num_rows else "content differs"
    return f"shard {index} ({now.uri}) changed: {what}"


def _set_change(was: Sequence[ShardRecord], now: Sequence[ShardRecord]) -> str:
    gone = [s.uri for s in was if s.uri not in {n.uri for n in now}]
    added = [s.uri for s in now if s.uri not in {w.uri for w in was}]
    changed = {s.uri: s for s in was}
    altered = [s.uri for s in now if s.uri in changed and _content(changed[s.uri]) != _content(s)]
    kinds = (("new", added), ("missing", gone), ("changed", altered))
    details = "; ".join(f"{kind}: {_some(uris)}" for kind, uris in kinds if uris)
    return f"the input has {len(now)} shards, was {len(was)} ({details or 'in another order'})"


def _some(uris: Sequence[str]) -> str:
    more = f" and {len(uris) - 3} more" if len(uris) > 3 else ""
    return ", ".join(uris[:3]) + more
