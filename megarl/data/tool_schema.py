"""JSON types of a tool's arguments, for formats in which models write arguments as text."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

MAX_SCHEMAS = 100
"""Maximum number of schemas read per argument. References between them may be circular."""

CHOICES = ("anyOf", "oneOf", "allOf")


def argument_types(parameters: Any) -> dict[str, frozenset[str]]:
    """Return the JSON types that the schema of a tool's parameters names for each argument. An argument whose schema
    names no type has an empty set. Agents write such schemas, so any part may be missing or invalid."""
    properties = parameters.get("properties") if isinstance(parameters, dict) else None
    if not isinstance(properties, dict):
        return {}
    return {argument: _types(schema, parameters) for argument, schema in properties.items()}


def types_of(value: Any) -> frozenset[str]:
    """Return the JSON types that describe a JSON value."""
    match value:
        case bool():
            return frozenset({"boolean"})
        case int():
            return frozenset({"integer", "number"})
        case float():
            return frozenset({"number"})
        case str():
            return frozenset({"string"})
        case list():
            return frozenset({"array"})
        case dict():
            return frozenset({"object"})
    return frozenset({"null"})


def _types(schema: Any, parameters: dict[str, Any]) -> frozenset[str]:
    """Return the types that a schema and its nested schemas name, including the types of enumerated values."""
    types: set[str] = set()
    pending = [schema]
    for each in pending:  # the loop body appends to the list
        if isinstance(each, dict):
            named = each.get("type")
            types.update(name for name in (named if isinstance(named, list) else [named]) if isinstance(name, str))
            for value in [*_items(each, "enum"), *([each["const"]] if "const" in each else [])]:
                types |= types_of(value)
            pending += islice(_inner(each, parameters), max(0, MAX_SCHEMAS - len(pending)))
    return frozenset(types)


def _inner(schema: dict[str, Any], parameters: dict[str, Any]) -> Iterator[Any]:
    """Yield a schema's alternatives and the definition that it refers to."""
    for key in CHOICES:
        yield from _items(schema, key)
    reference = schema.get("$ref")
    if isinstance(reference, str):
        place, _, name = reference.removeprefix("#/").partition("/")
        definitions = parameters.get(place)
        yield definitions.get(name) if isinstance(definitions, dict) else None


def _items(schema: dict[str, Any], key: str) -> list[Any]:
    items = schema.get(key)
    return items if isinstance(items, list) else []
