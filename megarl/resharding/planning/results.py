"""Keeps results for other processes: a file for each, named by a hash of what it follows from."""

from __future__ import annotations

import hashlib
import json
import logging
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

PACKAGE = Path(__file__).parents[1]
ROOMS = ("config", "resharding")
"""The rooms whose code a result follows from."""


def kept(folder: Path, inputs: Any, compute: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Returns what compute() gives, as JSON; from the folder, if this code has computed it before.

    inputs   all that it follows from, as JSON

    The content of a damaged file is computed again, and nothing is kept in a folder that cannot be written; both are
    logged.
    """
    file = folder / f"{_digest([_code(), inputs])}.json"
    found = _read(file)
    if found is None:
        found = compute()
        _write(file, {"sha256": _digest(found), "content": found})
    return found


def _read(file: Path) -> dict[str, Any] | None:
    if not file.is_file():
        return None
    try:
        entry = json.loads(file.read_text(encoding="utf-8"))
        if entry["sha256"] == _digest(entry["content"]):
            return entry["content"]
    except (ValueError, KeyError, TypeError):
        pass
    logging.getLogger(__name__).warning("%s is damaged: its content is computed again", file)
    return None


def _write(file: Path, entry: dict[str, Any]) -> None:
    """Writes a file that is whole under its name, whenever this process ends."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".", dir=file.parent) as folder:
            whole = Path(folder) / file.name
            whole.write_text(json.dumps(entry), encoding="utf-8")
            whole.replace(file)
    except OSError as error:
        logging.getLogger(__name__).warning("%s: not kept for the next time (%s)", file, error.strerror)


@cache
def _code() -> str:
    """Returns the SHA-256 of the rooms' source files."""
    digest = hashlib.sha256()
    for path in sorted(path for room in ROOMS for path in (PACKAGE / room).rglob("*.py")):
        digest.update(f"{path.relative_to(PACKAGE)}\0".encode() + path.read_bytes())
    return digest.hexdigest()


def _digest(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
