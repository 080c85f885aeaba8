"""Files and folders on disk: folders that appear when they are complete, names with numbers in them, rows of text."""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from megarl.core.errors import UserError

Progress = Callable[[str, int, int], None]
"""A function that is called with what has just been done ("checked", "written", "verified"), to how many bytes, and how
many there are in all."""


def no_progress(done: str, num_bytes: int, total: int) -> None:
    pass


@contextmanager
def new_folder(out: Path, num_bytes: int) -> Iterator[Path]:
    """Gives a hidden folder beside `out` to write into, which becomes `out` at the end, when all of it is on the disk.
    After an error nothing is left of it. Raises UserError as require_room does.
    """
    require_room(out, num_bytes)
    with tempfile.TemporaryDirectory(prefix=f".{out.name}-", dir=out.parent) as temporary:
        folder = Path(temporary) / out.name
        folder.mkdir()
        yield folder
        for path in (*folder.rglob("*"), folder):
            sync(path)
        folder.rename(out)
    sync(out.parent)


def require_room(out: Path, num_bytes: int) -> None:
    """Raises UserError where `out` exists, or its disk has no room for it. num_bytes: about what will be written."""
    if out.exists():
        raise UserError(f"{out} exists already; give a new folder or remove it")
    out.parent.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(out.parent).free
    if num_bytes > free:
        raise UserError(
            f"{out}: its disk has {free / 1e9:.2f} GB free, and {num_bytes / 1e9:.2f} GB are to be written; free some "
            "or give a folder on another disk"
        )


def sync(path: Path) -> None:
    """Waits until a file, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def number_in(name: str, pattern: str) -> int | None:
    """Returns the n whose pattern.format(n) is the name, None if there is none. pattern: such as step_{:06d}."""
    before, after = re.split(r"{.*}", pattern)
    digits = name.removeprefix(before).removesuffix(after)
    number = int(digits) if re.fullmatch(r"[0-9]+", digits) else None
    return number if number is not None and pattern.format(number) == name else None


def numbered(folder: Path, pattern: str) -> dict[int, Path]:
    """Returns the folder's entries with such names, by ascending number; other entries are somebody else's."""
    found = {number_in(path.name, pattern): path for path in folder.glob("*")}
    found.pop(None, None)
    return dict(sorted(found.items()))


def replace_text(file: Path, text: str) -> None:
    """Writes a file that is whole from the moment it has its name, in place of an earlier one."""
    new = file.with_name(f".{file.name}")
    new.write_text(text, encoding="utf-8")
    new.replace(file)


def append_rows(path: Path, rows: Iterable[Any]) -> None:
    """Appends JSON values to a file, a line each, as text that people can read."""
    # UTF-8 has no lone surrogates, which texts may hold. So replaced, they are JSON's own escapes.
    with path.open("a", encoding="utf-8", errors="backslashreplace") as file:
        file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
