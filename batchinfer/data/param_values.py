"""The sampling parameters that a row may carry: for each, which Arrow types can hold it and how a value is read. Used
by row_params.py."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

import pyarrow as pa


@dataclass(frozen=True, slots=True)
class RowParameter:
    """read: the value as SamplingParams has it; raises ValueError saying what is allowed. fits: whether a column of
    that type can hold it."""

    read: Callable[[Any], Any]
    fits: Callable[[pa.DataType], bool]


def _allow(holds: bool, allowed: str) -> None:
    if not holds:
        raise ValueError(allowed)


def read_float(value: Any) -> float:
    _allow(isinstance(value, int | float | Decimal) and not isinstance(value, bool), "a number")
    return float(value)


def read_int(value: Any) -> int:
    """Whole floats count, as a column of integers with nulls may have been made one of floats."""
    _allow(isinstance(value, int | float | Decimal) and not isinstance(value, bool), "an integer")
    _allow(isinstance(value, int) or value == value // 1, "an integer")
    return int(value)


def read_bool(value: Any) -> bool:
    _allow(isinstance(value, bool), "true or false")
    return bool(value)


def read_stop(value: Any) -> tuple[str, ...]:
    """A string, a list of strings, or a JSON text of such a list."""
    if isinstance(value, str):
        parsed = _json_or_none(value) if value.lstrip().startswith("[") else None
        value = parsed if _is_list_of(parsed, str) else [value]
    _allow(_is_list_of(value, str), "a string or a list of strings")
    return tuple(value)


def read_token_ids(value: Any) -> tuple[int, ...]:
    """A list of integers or its JSON text."""
    if isinstance(value, str):
        value = _json_or_none(value)
    _allow(isinstance(value, list), "a list of token ids")
    try:
        return tuple(read_int(item) for item in value)
    except ValueError:
        raise ValueError("a list of token ids") from None


def read_logit_bias(value: Any) -> tuple[tuple[int, float], ...]:
    """A map or struct of token id to bias, or its JSON text; a null bias, as a struct has it for a key that the row
    lacks, is none."""
    allowed = 'an object of token id to number, as in {"42": -1.5}'
    if isinstance(value, str):
        value = _json_or_none(value)
    if isinstance(value, Mapping):
        value = list(value.items())
    _allow(isinstance(value, list), allowed)
    try:
        return tuple((int(token), read_float(bias)) for token, bias in value if bias is not None)
    except (ValueError, TypeError):
        raise ValueError(allowed) from None


def _json_or_none(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _is_list_of(value: object, kind: type) -> bool:
    return isinstance(value, list) and all(isinstance(item, kind) for item in value)


def _is_number(kind: pa.DataType) -> bool:
    return pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind)


def _is_text(kind: pa.DataType) -> bool:
    return pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)


def _is_list(kind: pa.DataType, of: Callable[[pa.DataType], bool]) -> bool:
    lists = (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list)
    return any(is_list(kind) for is_list in lists) and (of(kind.value_type) or pa.types.is_null(kind.value_type))


def _fits_bias(kind: pa.DataType) -> bool:
    return _is_text(kind) or pa.types.is_map(kind) or pa.types.is_struct(kind)


_FLOAT = RowParameter(read_float, _is_number)
_INT = RowParameter(read_int, _is_number)

ROW_PARAMETERS: Mapping[str, RowParameter] = {
    "max_tokens": _INT,
    "min_tokens": _INT,
    "temperature": _FLOAT,
    "top_p": _FLOAT,
    "top_k": _INT,
    "min_p": _FLOAT,
    "seed": _INT,
    "stop": RowParameter(read_stop, lambda kind: _is_text(kind) or _is_list(kind, _is_text)),
    "stop_token_ids": RowParameter(read_token_ids, lambda kind: _is_text(kind) or _is_list(kind, _is_number)),
    "repetition_penalty": _FLOAT,
    "presence_penalty": _FLOAT,
    "frequency_penalty": _FLOAT,
    "logit_bias": RowParameter(read_logit_bias, _fits_bias),
    "n": _INT,
    "ignore_eos": RowParameter(read_bool, pa.types.is_boolean),
}
