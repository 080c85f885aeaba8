"""Cache results on disk, one file per result, named after a hash of its inputs."""

from __future__ import annotations

import hashlib
import json
import logging
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PACKAGES = ("config", "models", "resharding")
"""Packages whose source code is part of the cache key."""


def cached(folder: Path, inputs: Any, compute: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return the JSON-serializable result of compute(), from the cache folder where possible. `inputs` are
    JSON-serializable values that determine the result.

    The result is recomputed if its file is corrupt, and not cached if the folder is not writable. Both are logged.
    """
    file = folder / f"{_digest([_code_hash(), inputs])}.json"
    result = _read(file)
    if result is None:
        result = compute()
        _write(file, {"sha256": _digest(result), "content": result})
    return result


def _read(file: Path) -> dict[str, Any] | None:
    if not file.is_file():
        return None
    try:
        entry = json.loads(file.read_bytes())
        if entry["sha256"] == _digest(entry["content"]):
            return entry["content"]
    except (OSError, ValueError, RecursionError, KeyError, TypeError):
        pass
    logging.getLogger(__name__).warning("%s is corrupt and will be recomputed", file)
    return None


def _write(file: Path, entry: dict[str, Any]) -> None:
    """Write the file atomically."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".", dir=file.parent) as folder:
            temporary = Path(folder) / file.name
            temporary.write_text(json.dumps(entry), encoding="utf-8")
            temporary.replace(file)
    except OSError as error:
        logging.getLogger(__name__).warning("%s: could not cache the result (%s)", file, error.strerror)


@cache
def _code_hash() -> str:
    """Return the SHA-256 of the packages' source files."""
    digest = hashlib.sha256()
    for path in sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py")):
        digest.update(f"{path.relative_to(ROOT)}\0".encode() + path.read_bytes())
    return digest.hexdigest()


def _digest(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
