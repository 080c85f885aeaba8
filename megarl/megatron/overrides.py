"""Validates megatron_overrides: fields in Megatron's dataclasses, checked by name and type."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping
from enum import Enum
from typing import Any, TypeVar, get_args, get_type_hints

import torch
from pydantic import ConfigDict, TypeAdapter, ValidationError

from megarl.core.errors import UserError

T = TypeVar("T")


def checked(key: str, extra: Mapping[str, Any], target: type, reserved: Mapping[str, str | None]) -> dict[str, Any]:
    """Return the override fields for the dataclass `target`, with the names of dtypes and enum members resolved. Raise
    a UserError if a field is unknown, reserved, or of the wrong type.

    Args:
        key: the config key that holds the fields, such as actor.megatron_overrides.model.
        reserved: field that must not be overridden -> config key that determines it; None if the trainer relies on the
            field's default.
    """
    defaults = {field.name: field.default for field in dataclasses.fields(target)}
    hints = get_type_hints(target)
    values = {}
    for name, value in extra.items():
        if name not in defaults:
            near = difflib.get_close_matches(name, defaults, n=1)
            remedy = f"use {near[0]}" if near else f"remove {name}"
            raise UserError(f"{key}.{name}={value}: Megatron's {target.__name__} has no such field. Fix: {remedy}")
        if name in reserved:
            home = reserved[name]
            why = (
                f"megarl derives this field from {home}. Fix: remove {name} and change {home} instead"
                if home
                else f"the trainer requires its own value. Fix: remove {name}"
            )
            raise UserError(f"{key}.{name}={value}: {why}")
        values[name] = _converted(f"{key}.{name}", value, hints[name] | None if defaults[name] is None else hints[name])
    return values


def build(settings: str, target: type[T], fields: Mapping[str, Any]) -> T:
    """Build the dataclass. Raise a UserError that names `settings` if the dataclass rejects its fields."""
    try:
        return target(**fields)
    except (AssertionError, ValueError) as error:
        raise UserError(
            f"{settings}: Megatron's {target.__name__} rejects these settings: {error}. Fix: change or remove them"
        ) from error


def describe_settings(section: str, key: str, extra: Mapping[str, Any]) -> str:
    """Return a description of a section's settings for an error: its overrides or, if it has none, the section's
    name."""
    return ", ".join(f"{key}.{name}={value}" for name, value in extra.items()) or section


def _converted(key: str, value: Any, hint: Any) -> Any:
    kinds = get_args(hint) or (hint,)
    resolved = value
    if isinstance(value, str) and torch.dtype in kinds:
        resolved = getattr(torch, value, value)
    for kind in kinds:
        if isinstance(kind, type) and issubclass(kind, Enum) and value in kind.__members__:
            resolved = kind[value]
    try:
        return TypeAdapter(hint, config=ConfigDict(arbitrary_types_allowed=True)).validate_python(resolved, strict=True)
    except ValidationError:
        raise UserError(
            f"{key}={value!r}: expected {_readable(hint)}, but found {type(value).__name__}. Fix: set a value of the "
            "expected type"
        ) from None


def _readable(hint: Any) -> str:
    if isinstance(hint, type) and issubclass(hint, Enum):
        return f"one of {', '.join(hint.__members__)}"
    return hint.__name__ if isinstance(hint, type) else str(hint).replace("typing.", "").replace("torch.dtype", "dtype")
