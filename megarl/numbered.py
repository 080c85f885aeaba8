"""Files and folders that are named by a number."""

from __future__ import annotations

import re
from pathlib import Path


def number_in(name: str, pattern: str) -> int | None:
    """The n whose pattern.format(n) is the name, None if there is none. pattern: such as step_{:06d}."""
    before, after = re.split(r"{.*}", pattern)
    digits = name.removeprefix(before).removesuffix(after)
    number = int(digits) if re.fullmatch(r"[0-9]+", digits) else None
    return number if number is not None and pattern.format(number) == name else None


def numbered(folder: Path, pattern: str) -> dict[int, Path]:
    """The entries with such names, by ascending number; what else is in the folder is somebody else's."""
    found = {number_in(path.name, pattern): path for path in folder.glob("*")}
    found.pop(None, None)
    return dict(sorted(found.items()))
