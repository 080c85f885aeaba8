"""Reads JSONL files of a run that may have been killed while it wrote them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def read_objects(path: Path) -> tuple[list[dict[str, Any]], list[int]]:
    """Returns the objects of a JSONL file, and the numbers of the lines that hold none. NaN and infinities are read as
    None."""
    objects, unreadable = [], []
    with path.open(encoding="utf-8", errors="replace") as lines:
        for number, line in enumerate(lines, start=1):
            try:
                value = json.loads(line, parse_constant=lambda _: None)
            except json.JSONDecodeError:
                value = None
            if isinstance(value, dict):
                objects.append(value)
            else:
                unreadable.append(number)
    return objects, unreadable
