"""File operations: folders that appear only when complete, numbered names and JSON lines."""

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
"""Progress callback. It is called with the last action ("checked", "written", "verified"), the bytes processed and the
total bytes."""


def no_progress(done: str, num_bytes: int, total: int) -> None:
    pass


@contextmanager
def new_folder(out: Path, num_bytes: int) -> Iterator[Path]:
    """Yield a hidden folder next to `out` to write into; rename it to `out` once its contents are on disk. The hidden
    folder is deleted if the body raises. Raise a UserError under the conditions of `require_room`."""
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
    """Raise a UserError if `out` exists or its disk has less than about `num_bytes` of free space."""
    if out.exists():
        raise UserError(f"{out} already exists. Fix: choose a new folder or remove this folder")
    out.parent.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(out.parent).free
    if num_bytes > free:
        raise UserError(
            f"{out}: its disk has {free / 1e9:.2f} GB free, but {num_bytes / 1e9:.2f} GB are needed. Fix: free some "
            "space, or choose a folder on another disk"
        )


def sync(path: Path) -> None:
    """Flush a file, or the entries of a folder, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def number_in(name: str, pattern: str) -> int | None:
    """Return the number n for which pattern.format(n) equals the name; None if there is none. Example pattern:
    step_{:06d}."""
    before, after = re.split(r"{.*}", pattern)
    digits = name.removeprefix(before).removesuffix(after)
    number = int(digits) if re.fullmatch(r"[0-9]+", digits) else None
    return number if number is not None and pattern.format(number) == name else None


def numbered(folder: Path, pattern: str) -> dict[int, Path]:
    """Return the folder's entries whose names match the pattern, in ascending order of their numbers."""
    entries = [(number_in(path.name, pattern), path) for path in folder.glob("*")]
    return dict(sorted((number, path) for number, path in entries if number is not None))


def write_new_file(option: str, path: Path, text: str) -> None:
    """Write a file that does not exist yet. Raise a UserError if the file already exists or cannot be written. option:
    the command-line option that names the file, such as --html."""
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise UserError(
            f"{option} {path}: already exists, and megarl does not overwrite it. Fix: choose another file name"
        ) from None
    except OSError as error:
        raise UserError(
            f"{option} {path}: cannot be written ({error.strerror}). Fix: choose a file in a writable folder"
        ) from None


def replace_text(file: Path, text: str) -> None:
    """Write a text file atomically, replacing any earlier version."""
    new = file.with_name(f".{file.name}")
    new.write_text(text, encoding="utf-8")
    new.replace(file)


def append_rows(path: Path, rows: Iterable[Any]) -> None:
    """Append values to a file as lines of human-readable JSON."""
    # Text may contain lone surrogates, which UTF-8 cannot encode. backslashreplace turns them into JSON escapes.
    with path.open("a", encoding="utf-8", errors="backslashreplace") as file:
        file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
