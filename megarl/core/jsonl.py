"""Reads JSONL files whose writer may have been killed in the middle of a line."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any


def read_objects(
    path: Path, keep: Callable[[dict[str, Any]], dict[str, Any]] = dict
) -> tuple[list[dict[str, Any]], list[int]]:
    """Return the objects in a JSONL file, and the numbers of the lines that do not contain an object. NaN and
    infinities are read as None. `keep` reduces each object to the part to return, since objects may be large."""
    objects, unreadable = [], []
    with path.open(encoding="utf-8", errors="replace") as lines:
        for number, line in enumerate(lines, start=1):
            try:
                value = json.loads(line, parse_constant=lambda _: None)
            except json.JSONDecodeError:
                value = None
            if isinstance(value, dict):
                objects.append(keep(value))
            else:
                unreadable.append(number)
    return objects, unreadable
