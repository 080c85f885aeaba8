"""Parse tool calls whose names, arguments or values are JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from megarl.core.files import MAX_DEPTH, is_deeper
from megarl.data.tool_calls import Call, MalformedCall, ToolCall
from megarl.data.tool_schema import types_of


def json_calls(text: str, lists: bool = False) -> Iterator[Call]:
    """Parse one JSON object as a call; with `lists`, also accept a list of objects."""
    try:
        value = _json(text)
    except (ValueError, RecursionError) as error:
        yield MalformedCall(text, f"invalid JSON: {_message(error)}")
        return
    if lists and isinstance(value, list):
        for item in value:
            yield call_of(item, json.dumps(item, ensure_ascii=False))
    else:
        yield call_of(value, text)


def json_sequence(text: str) -> Iterator[Call]:
    """Parse calls separated by semicolons."""
    place = 0
    while place < len(text):
        try:
            value, end = _DECODER.raw_decode(text, place)
            _require_plain(value)
        except (ValueError, RecursionError) as error:
            yield MalformedCall(text[place:], f"invalid JSON: {_message(error)}")
            return
        yield call_of(value, text[place:end], ("parameters", "arguments"))
        place = end + len(text[end:]) - len(text[end:].lstrip("; \n\t"))


def named_call(name: str, arguments: str, number: str = "") -> Call:
    """Return the call with this name and these arguments, given as JSON text; a MalformedCall if they are not valid
    JSON."""
    text = f"{name} {arguments}"
    try:
        return call_of({"name": name, "arguments": _json(arguments), "id": number}, text)
    except (ValueError, RecursionError) as error:
        return MalformedCall(text, f"the arguments are not valid JSON: {_message(error)}")


PYTHON_WORDS = {"True": "true", "False": "false", "None": "null"}
"""Python's spellings of JSON constants, which Qwen's chat templates write in calls."""


def json_value(text: str, types: frozenset[str]) -> Any:
    """Convert an argument that is written as text to a value of a permitted type. Return the text itself if it is not
    valid JSON, or if the schema names no type, permits only strings, or permits strings but not the value's type."""
    if types <= {"string"}:
        return text
    try:
        value = _json(PYTHON_WORDS.get(text.strip(), text))
    except (ValueError, RecursionError):
        return text
    return value if "string" not in types or (types - {"string"}) & types_of(value) else text


def call_of(value: Any, text: str, keys: Sequence[str] = ("arguments",)) -> Call:
    """Return the call that a JSON value describes. `text` is the call as the model wrote it, and `keys` are the names
    that the arguments may have."""
    if not isinstance(value, dict):
        return MalformedCall(text, 'not a JSON object with "name" and "arguments"')
    name = value.get("name")
    if not isinstance(name, str) or not name:
        return MalformedCall(text, 'missing "name", which must be the tool name as a string')
    present = [key for key in keys if key in value]
    if not present:
        return MalformedCall(text, f'missing "{keys[0]}"; pass {{}} to a tool without arguments')
    arguments = value[present[0]]
    if not isinstance(arguments, dict):
        return MalformedCall(text, f'"{present[0]}" must be a JSON object with a value for each argument')
    number = value.get("id")
    return ToolCall(name, arguments, number if isinstance(number, str) else "")


def _json(text: str) -> Any:
    value = _DECODER.decode(text.strip())
    _require_plain(value)
    return value


def _require_plain(value: Any) -> None:
    """Raise a ValueError for lone surrogates, which tokenizers reject, for numbers such as 1e999, which parse as
    infinity, and for values that are nested too deeply."""
    if is_deeper(value, MAX_DEPTH):
        raise ValueError("it is nested too deeply")
    json.dumps(value, ensure_ascii=False, allow_nan=False).encode()


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not valid JSON")


def _message(error: Exception) -> str:
    return "it is nested too deeply" if isinstance(error, RecursionError) else str(error)


_DECODER = json.JSONDecoder(parse_constant=_refuse_constant)
