"""Messages for schema violations: origin, key, value and remedy."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from megarl.config.algorithm_schema import VARIANTS
from megarl.config.document import Document, Key, kind, show, value_at
from megarl.config.names import options_of, suggest, suggest_value
from megarl.core.errors import UserError
from megarl.core.text import encodable

COMMAND_LINE = "command line"

_REQUIRED = {
    "model.path": "a Hugging Face folder, a Hub id, or package:NAME",
    "data.source": "arithmetic, reasoning_gym:TASK, or a .jsonl or .parquet file",
}

_EXPECTED = {
    "bool_type": "true or false",
    "dict_type": "a mapping",
    "finite_number": "a finite number",
    "float_type": "a number",
    "greater_than": "more than {gt:g}",
    "greater_than_equal": "at least {ge:g}",
    "int_type": "an integer",
    "less_than": "less than {lt:g}",
    "less_than_equal": "at most {le:g}",
    "list_type": "a list",
    "literal_error": "{expected}",
    "model_type": "a mapping",
    "string_pattern_mismatch": "text that matches {pattern}",
    "string_too_short": "non-empty text",
    "string_type": "text",
    "too_short": "a non-empty list",
}
"""pydantic error type -> a description of the expected value."""


def describe(error: ValidationError, document: Document, file: str) -> list[str]:
    """Return one line per violation, and one line for all keys that are missing at an origin."""
    lines: list[str] = []
    missing: dict[str, list[Key]] = {}
    for detail in error.errors():
        key = detail["loc"]
        if detail["type"] == "missing":
            missing.setdefault(document.origin(key[:-1], file), []).append(key)
        elif detail["type"] == "extra_forbidden":
            lines += [_unknown(leaf, document, file) for leaf in _leaves(key, detail["input"])]
        else:
            lines.append(_wrong(detail, document.origin(key, file), file))
    return lines + [f"{place}: {_missing(keys)}" for place, keys in missing.items()]


def _unknown(key: Key, document: Document, file: str) -> str:
    name = ".".join(part for part in key if isinstance(part, str))
    return f"{document.origin(key, file)}: {_dotted(key)}: unknown key; {_advice(name, document)}"


def _advice(name: str, document: Document) -> str:
    """Return advice on what to write instead of an unknown key."""
    for variant in VARIANTS:
        section, _, option = name.rpartition(".")
        if section == variant.key.rpartition(".")[0]:
            options = options_of(variant, value_at(document.values, variant.key), option)
            return options if " is an option of " in options else f"{options}; {suggest(name)}"
    return suggest(name)


def _missing(keys: list[Key]) -> str:
    listed = f"missing {'key' if len(keys) == 1 else 'keys'} {', '.join(_dotted(key) for key in keys)}"
    if any(isinstance(part, int) for key in keys for part in key):
        return f"{listed}. Fix: set every required key of the list entry"
    return f"{listed}. Fix: start the file with `base: base.yaml`, which has the defaults"


def _wrong(detail: ErrorDetails, origin: str, file: str) -> str:
    name, value = _dotted(detail["loc"]), detail["input"]
    if detail["type"] == "value_error":  # raised for a user's file, with a message that names the key
        return str(detail.get("ctx", {})["error"])
    if value is None and name in _REQUIRED:
        return f"{file}: {name} is required. Fix: set it to {_REQUIRED[name]}, or pass {name}=VALUE on the command line"
    expected = _EXPECTED[detail["type"]].format(**detail.get("ctx", {}))
    message, remedy = f"{origin}: {name}={show(value)}: expected {expected}", f"set {name} to {expected}"
    if detail["type"] == "literal_error":
        remedy = f"set {name} to one of these values"
        probable = suggest_value(name, value, re.findall("'([^']*)'", expected))
        if probable is not None:
            message, remedy = f"{message}; did you mean {probable}?", f"set {name} to {probable}"
    if detail["type"].endswith("_type"):
        message, remedy = f"{message}, found {kind(value)}", f"set {name} to {expected}"
    if detail["type"] == "string_type" and isinstance(value, bool | int | float):
        quoted = f"'{show(value)}'"
        remedy = "write " + (f'"{name}={quoted}"' if origin == COMMAND_LINE else quoted)
    return f"{message}{'' if message.endswith('?') else '.'} Fix: {remedy}"


def require_encodable(document: Document, file: str) -> None:
    """Raise a UserError if a string contains a lone surrogate: Python's representation of command-line bytes that are
    not UTF-8. Neither paths nor JSON files can contain one."""
    for key, value in _values((), document.values):
        if isinstance(value, str) and encodable(value) != value:
            raise UserError(
                f"{document.origin(key, file)}: {_dotted(key)}={show(value)}: not valid UTF-8. Fix: remove the "
                "invalid characters"
            )


def _values(key: Key, value: Any) -> Iterator[tuple[Key, Any]]:
    """Yield the values below a key that are neither mappings nor lists."""
    if isinstance(value, dict | list):
        for part, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _values((*key, part), inner)
    else:
        yield key, value


def _leaves(key: Key, value: Any) -> Iterator[Key]:
    """Yield the leaf keys below an unknown key, or the key itself. The last name hints at the intended key."""
    if isinstance(value, dict) and value:
        for name, inner in value.items():
            yield from _leaves((*key, name), inner)
    else:
        yield key


def _dotted(key: Key) -> str:
    return ".".join(str(part) for part in key)


def raise_all(violations: Iterable[str | None]) -> None:
    """Raise a UserError with one line per violation, if there are any."""
    lines = [line for line in violations if line is not None]
    if lines:
        raise UserError("\n".join(lines))
