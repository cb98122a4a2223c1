"""The columns that batchinfer appends to each row, and how Results become them. Used by the journal and the writer."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from batchinfer.errors import UsageError
from batchinfer.request import RequestTimes, Result, TokenLogprob

_TOKEN = [pa.field("token_id", pa.int32()), pa.field("logprob", pa.float32())]
_TOP = pa.list_(pa.struct(_TOKEN))
_LOGPROBS = pa.list_(pa.struct([*_TOKEN, pa.field("top", _TOP)]))
_PROMPT_LOGPROBS = pa.struct(
    [pa.field("sum", pa.float64()), pa.field("count", pa.int32()), pa.field("per_token", pa.list_(pa.float32()))]
)
_TIMES = ("queue_ms", "prefill_ms", "ttft_ms", "tbt_mean_ms", "tbt_p50_ms", "tbt_p99_ms", "tbt_max_ms", "latency_ms")
_NO_TIMES = RequestTimes(*[None] * len(_TIMES))  # type: ignore[arg-type]

_FIELDS = [
    pa.field("request_id", pa.string()),
    pa.field("sample_index", pa.int32()),
    pa.field("completion", pa.string()),
    pa.field("finish_reason", pa.string()),
    pa.field("stop_reason", pa.string()),
    pa.field("error_code", pa.string()),
    pa.field("error_message", pa.string()),
    pa.field("prompt_tokens", pa.int32()),
    pa.field("cached_prompt_tokens", pa.int32()),
    pa.field("completion_tokens", pa.int32()),
    pa.field("num_preemptions", pa.int32()),
    *[pa.field(name, pa.float64()) for name in _TIMES],
]

_GETTERS: dict[str, Callable[[Result], Any]] = {
    "request_id": lambda r: str(r.id),
    "sample_index": lambda r: r.id.sample,
    "completion": lambda r: r.text,
    "finish_reason": lambda r: r.finish_reason,
    "stop_reason": lambda r: r.stop_reason,
    "error_code": lambda r: r.error_code,
    "error_message": lambda r: r.error_message,
    "prompt_tokens": lambda r: r.prompt_tokens,
    "cached_prompt_tokens": lambda r: r.cached_prompt_tokens,
    "completion_tokens": lambda r: r.completion_tokens,
    "num_preemptions": lambda r: r.num_preemptions,
    "completion_token_ids": lambda r: r.token_ids,
    "cumulative_logprob": lambda r: r.cumulative_logprob,
}


def result_schema(
    prefix: str = "", *, token_ids: bool = False, logprobs: bool = False, prompt_logprobs: bool = False
) -> pa.Schema:
    """The appended columns, the same for every part of a job. logprobs adds cumulative_logprob and logprobs."""
    fields = list(_FIELDS)
    if token_ids:
        fields.append(pa.field("completion_token_ids", pa.list_(pa.int32())))
    if logprobs:
        fields += [pa.field("cumulative_logprob", pa.float64()), pa.field("logprobs", _LOGPROBS)]
    if prompt_logprobs:
        fields.append(pa.field("prompt_logprobs", _PROMPT_LOGPROBS))
    return pa.schema([f.with_name(prefix + f.name) for f in fields])


def require_no_clash(input_schema: pa.Schema, appended: pa.Schema, where: str) -> None:
    """UsageError where an appended column bears the name of an input column."""
    clashes = [name for name in appended.names if name in set(input_schema.names)]
    if clashes:
        names = ", ".join(repr(name) for name in clashes)
        raise UsageError(f"{where} already has the column {names}; give --output-prefix (as in --output-prefix out_)")


def results_to_batch(results: Sequence[Result], schema: pa.Schema) -> pa.RecordBatch:
    """One record a result, in order. schema: result_schema without a prefix."""
    times = [r.times or _NO_TIMES for r in results]
    arrays = []
    for column in schema:
        if column.name in _GETTERS:
            array = pa.array(map(_GETTERS[column.name], results), column.type, size=len(results))
        elif column.name == "logprobs":
            array = _logprobs_array([r.logprobs for r in results])
        elif column.name == "prompt_logprobs":
            array = _prompt_logprobs_array(results)
        else:
            array = pa.array([getattr(t, column.name) for t in times], column.type)
        arrays.append(array)
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def _offsets(lengths: Iterable[int]) -> pa.Array:
    return pa.array(np.concatenate([[0], np.cumsum(np.fromiter(lengths, np.int64))]).astype(np.int32))


def _token_struct(pairs: Sequence[tuple[int, float]], *more: pa.Array) -> list[pa.Array]:
    ids = np.fromiter((p[0] for p in pairs), np.int32, len(pairs))
    values = np.fromiter((p[1] for p in pairs), np.float32, len(pairs))
    return [pa.array(ids), pa.array(values), *more]


def _logprobs_array(rows: Sequence[list[TokenLogprob] | None]) -> pa.Array:
    tokens = [t for row in rows for t in row or ()]
    top_values = pa.StructArray.from_arrays(_token_struct([p for t in tokens for p in t.top]), fields=_TOKEN)
    top = pa.ListArray.from_arrays(_offsets(len(t.top) for t in tokens), top_values)
    entries = _token_struct([(t.token_id, t.logprob) for t in tokens], top)
    values = pa.StructArray.from_arrays(entries, fields=list(_LOGPROBS.value_type))
    is_null = pa.array([row is None for row in rows], pa.bool_())
    return pa.ListArray.from_arrays(_offsets(len(row or ()) for row in rows), values, mask=is_null)


def _prompt_logprobs_array(results: Sequence[Result]) -> pa.Array:
    rows = [r.prompt_logprobs for r in results]
    parts = [row.per_token for row in rows if row is not None]
    values = pa.array(np.concatenate(parts).astype(np.float32) if parts else np.zeros(0, np.float32))
    arrays = [
        pa.array([row and row.sum for row in rows], pa.float64()),
        pa.array([row and row.count for row in rows], pa.int32()),
        pa.ListArray.from_arrays(_offsets(0 if row is None else len(row.per_token) for row in rows), values),
    ]
    is_null = pa.array([row is None for row in rows], pa.bool_())
    return pa.StructArray.from_arrays(arrays, fields=list(_PROMPT_LOGPROBS), mask=is_null)


def record_bytes(batch: pa.RecordBatch) -> Any:
    """int64 [num_rows]: about how many bytes each record takes in Arrow form; exact for the text."""
    sizes = np.full(batch.num_rows, 256, np.int64)
    for name, array in zip(batch.schema.names, batch.columns, strict=True):
        if name in ("completion", "error_message", "stop_reason"):
            sizes += pc.binary_length(array).fill_null(0).to_numpy(zero_copy_only=False)
        elif name in ("completion_token_ids", "logprobs"):
            sizes += _share(pc.list_value_length(array), array.nbytes)
        elif name == "prompt_logprobs":
            sizes += _share(pc.list_value_length(pc.struct_field(array, "per_token")), array.nbytes)
    return sizes


def _share(lengths: pa.Array, nbytes: int) -> Any:
    counts = lengths.fill_null(0).to_numpy(zero_copy_only=False).astype(np.int64)
    return counts * nbytes // max(int(counts.sum()), 1)


@dataclass(slots=True)
class Tally:
    """Counts over the answers that are safe, those of earlier runs of the same job included."""

    rows: int = 0  # input rows
    completions: int = 0  # output rows
    finish_reasons: Counter[str] = field(default_factory=Counter)  # output rows by finish_reason
    errors: Counter[str] = field(default_factory=Counter)  # output rows by error code
    prompt_tokens: int = 0
    cached_prompt_tokens: int = 0
    completion_tokens: int = 0

    @property
    def num_errors(self) -> int:
        return self.errors.total()

    def add(self, batch: "pa.RecordBatch | pa.Table", prefix: str = "") -> None:
        """Count records; each row's records come together."""
        self.completions += batch.num_rows
        self.rows += pc.sum(pc.equal(batch[prefix + "sample_index"], 0)).as_py() or 0
        for name in ("prompt_tokens", "cached_prompt_tokens", "completion_tokens"):
            setattr(self, name, getattr(self, name) + (pc.sum(batch[prefix + name]).as_py() or 0))
        for name, counts in (("finish_reason", self.finish_reasons), ("error_code", self.errors)):
            for entry in pc.value_counts(batch[prefix + name]):
                if entry["values"].is_valid:
                    counts[entry["values"].as_py()] += entry["counts"].as_py()


TALLY_COLUMNS = (
    *("sample_index", "finish_reason", "error_code"),
    *("prompt_tokens", "cached_prompt_tokens", "completion_tokens"),
)
