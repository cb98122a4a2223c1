"""Chat messages as rows carry them, made into what chat templates read. Used by prompts.py."""

import json
from collections.abc import Mapping
from typing import Any

from batchinfer.errors import ErrorCode, RowError


def parse_messages(value: object) -> list[dict[str, Any]]:
    """Messages with a role and text content, in the order given.

    value: a list of messages or its JSON text. A message's `content` is text or a list of text parts, which are joined
    by a newline as vLLM does for text models. Null fields, such as Arrow gives a struct that lacks a key, are left out.
    Roles are the template's matter. Raises RowError: BAD_PROMPT for anything else, EMPTY_PROMPT for no message.
    """
    if isinstance(value, str):
        value = _from_json(value)
    if not isinstance(value, list):
        raise _bad(f"messages must be a list, not {_kind(value)}")
    if not value:
        raise RowError(ErrorCode.EMPTY_PROMPT, "the list of messages is empty")
    return [_parse_message(position, message) for position, message in enumerate(value)]


def _from_json(text: str) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _bad(f"messages are text but not JSON: {error}") from error


def _parse_message(position: int, message: object) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise _bad(f"message {position} must be an object with role and content, not {_kind(message)}")
    fields: dict[str, Any] = _without_nulls(message)
    if not isinstance(fields.get("role"), str):
        raise _bad(f"message {position} has no role (its fields: {', '.join(map(str, fields)) or 'none'})")
    if "content" in fields:
        fields["content"] = _content_text(position, fields["content"])
    elif not fields.get("tool_calls"):
        raise _bad(f"message {position} has no content")
    return fields


def _content_text(position: int, content: object) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise _bad(f"content of message {position} must be text or a list of text parts, not {_kind(content)}")
    return "\n".join(_part_text(position, part) for part in content)


def _part_text(position: int, part: object) -> str:
    if isinstance(part, str):
        return part
    if isinstance(part, Mapping) and isinstance(part.get("text"), str) and part.get("type", "text") == "text":
        return str(part["text"])
    kind = repr(part.get("type")) if isinstance(part, Mapping) else _kind(part)
    raise _bad(f"content of message {position} has a part {kind}; the model reads parts of type 'text'")


def _without_nulls(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_without_nulls(item) for item in value]
    return value


def _kind(value: object) -> str:
    return "null" if value is None else type(value).__name__


def _bad(message: str) -> RowError:
    return RowError(ErrorCode.BAD_PROMPT, message)
