"""Which columns steer sampling (--param-columns), and the sampling parameters of each row. Used by prompts.py; the
pipeline announces `describe()`."""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from batchinfer.data.columns import Unreadable, column_values
from batchinfer.data.jsonl_schema import is_json_text
from batchinfer.data.param_values import ROW_PARAMETERS
from batchinfer.data.prompt_source import PromptSource
from batchinfer.errors import ErrorCode, RowError, UsageError
from batchinfer.request import SamplingParams

# Parameters whose names are common among columns of data, and the range in which they are customary.
STEER_OR_DATA = {"temperature": (0.0, 2.0)}


@dataclass(frozen=True, slots=True)
class ParamColumns:
    """names: the columns that steer. is_auto: chosen by their names. ignored: (column, reason) of those that bear a
    parameter's name and do not steer."""

    names: tuple[str, ...] = ()
    is_auto: bool = False
    ignored: tuple[tuple[str, str], ...] = ()

    def describe(self) -> str:
        """One line for the log."""
        steering = "row parameters: " + (_listed(self.names) or "no column")
        steering += " steer sampling" if len(self.names) > 1 else " steers sampling"
        if self.is_auto and self.names:
            steering += "; if they are data, --param-columns none"
        reasons = "".join(f"; `{name}` does not: {reason}" for name, reason in self.ignored)
        return steering + reasons

    def parse(
        self, batch: pa.RecordBatch, defaults: SamplingParams, vocab_size: int
    ) -> list[SamplingParams | RowError]:
        """The parameters of each row: its own values over the defaults; a null is the default. Equal rows share one
        object. A bad value is a RowError(BAD_PARAMETER) that names the field and what is allowed."""
        columns = {name: column_values(batch, name) for name in self.names}
        present = {name: values for name, values in columns.items() if values is not None}
        known: dict[tuple[tuple[str, Any], ...], SamplingParams | RowError] = {}
        rows: list[SamplingParams | RowError] = []
        for row in range(batch.num_rows):
            given = {name: values[row] for name, values in present.items() if values[row] is not None}
            try:
                values = tuple((name, _read(name, value)) for name, value in given.items())
                if values not in known:
                    known[values] = _merge(defaults, dict(values), vocab_size)
                rows.append(known[values])
            except ValueError as error:
                rows.append(RowError(ErrorCode.BAD_PARAMETER, f"{error}{self._hint()}"))
        return rows

    def without_data(self, samples: Mapping[str, Sequence[Any]]) -> "ParamColumns":
        """Without the columns that `auto` took by their name and whose values show that they are data.

        samples: values of columns of STEER_OR_DATA. One in ten beyond a parameter's customary range makes a column
        data; fewer are faults of their rows.
        """
        data = {}
        for name, values in samples.items():
            low, high = STEER_OR_DATA[name]
            given = [value for value in values if isinstance(value, int | float)]
            beyond = [value for value in given if not low <= value <= high]
            if len(beyond) * 10 > len(given):
                data[name] = f"it holds values such as {beyond[0]:g}, outside {low:g} to {high:g}"
        names = tuple(name for name in self.names if name not in data)
        return ParamColumns(names, self.is_auto, self.ignored + tuple(data.items()))

    def _hint(self) -> str:
        return " (if the column is data, not a parameter: --param-columns none)" if self.is_auto else ""


NO_PARAM_COLUMNS = ParamColumns()


def choose_param_columns(option: str, source: PromptSource, *schemas: pa.Schema) -> ParamColumns:
    """The columns that steer sampling.

    option: `auto` takes the columns of any of the schemas that bear the name of a parameter, can hold it by their type,
    and are not what the prompt is made of; `none`; or names, as a,b, each of which must be a parameter and a column
    (UsageError).
    """
    fields = {
        field.name: [s.field(field.name) for s in schemas if field.name in s.names] for s in schemas for field in s
    }
    if option == "none":
        return NO_PARAM_COLUMNS
    if option != "auto":
        return ParamColumns(_named(option, list(fields)))
    candidates = {name: _why_not(name, fields[name], source) for name in ROW_PARAMETERS if name in fields}
    names = tuple(name for name, reason in candidates.items() if reason is None)
    ignored = tuple((name, reason) for name, reason in candidates.items() if reason is not None)
    return ParamColumns(names, is_auto=True, ignored=ignored)


def _named(option: str, columns: Sequence[str]) -> tuple[str, ...]:
    names = tuple(name.strip() for name in option.split(",") if name.strip())
    for name in names:
        if name not in ROW_PARAMETERS:
            allowed = ", ".join(ROW_PARAMETERS)
            raise UsageError(f"--param-columns {option}: `{name}` is not a row parameter; they are {allowed}")
        if name not in columns:
            raise UsageError(f"--param-columns {option}: no column `{name}`; the columns are {_listed(columns)}")
    if not names:
        raise UsageError(f"--param-columns {option!r}: must be auto, none or names separated by commas")
    return tuple(dict.fromkeys(names))


def _why_not(name: str, fields: Sequence[pa.Field], source: PromptSource) -> str | None:
    """Why `auto` does not take the column; None where it does."""
    if name in source.columns:
        return "the prompt is made from it"
    for field in fields:
        if not (is_json_text(field) or pa.types.is_null(field.type) or _fits(name, field.type)):
            return f"its type is {field.type}"
    return None


def _fits(name: str, kind: pa.DataType) -> bool:
    return ROW_PARAMETERS[name].fits(kind.value_type if pa.types.is_dictionary(kind) else kind)


def _read(name: str, value: Any) -> Any:
    if isinstance(value, Unreadable):
        raise ValueError(f"{name} cannot be read: {value.reason}")
    try:
        return ROW_PARAMETERS[name].read(value)
    except (ValueError, OverflowError) as error:
        raise ValueError(f"{name} = {value!r}: must be {error}") from None


def _merge(defaults: SamplingParams, given: dict[str, Any], vocab_size: int) -> SamplingParams:
    params = dataclasses.replace(defaults, **given) if given else defaults
    if given:
        require_in_vocabulary(params, vocab_size)
    return params


def require_in_vocabulary(params: SamplingParams, vocab_size: int) -> None:
    """Raises ValueError for a stop token or biased token that the model does not have."""
    for name, token_ids in (
        ("stop_token_ids", params.stop_token_ids),
        ("logit_bias", tuple(token for token, _ in params.logit_bias)),
    ):
        for token_id in token_ids:
            if not 0 <= token_id < vocab_size:
                raise ValueError(f"{name} has token id {token_id}: must be from 0 to {vocab_size - 1}")


def _listed(names: Sequence[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)
