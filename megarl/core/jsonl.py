"""Reads JSONL files whose writer may have been killed in the middle of a line."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from megarl.core.files import MAX_LINE_BYTES, lines_of, open_regular, parse_json

Objects = list[dict[str, Any]]
Keep = Callable[[dict[str, Any]], dict[str, Any]]


def read_objects(path: Path, keep: Keep = dict) -> tuple[Objects, list[int]]:
    """Return the objects in a JSONL file, and the numbers of the lines that do not contain an object. NaN and
    infinities are read as None. `keep` reduces each object to the part to return, since objects may be large. A line
    that cannot be read counts as not containing an object. Raise a UserError if the file is not a regular file."""
    with open_regular(path) as lines:
        return parse_lines(lines_of(lines), 1, keep)


def parse_lines(lines: Iterable[bytes], first: int, keep: Keep = dict) -> tuple[Objects, list[int]]:
    """Return the objects and line numbers as `read_objects` does. first: number of the first line."""
    objects, unreadable = [], []
    for number, line in enumerate(lines, start=first):
        try:
            if len(line) == MAX_LINE_BYTES:
                raise ValueError("longer than any line that megarl writes")
            value = parse_json(line.decode("utf-8", "replace"), lambda _: None)
            if not isinstance(value, dict):
                raise ValueError("not an object")
            objects.append(keep(value))
        except (ValueError, TypeError, LookupError, AttributeError, OverflowError):
            unreadable.append(number)
    return objects, unreadable
