"""Named shared memory, by which an engine's ranks talk to each other. It outlives processes that are killed."""

from __future__ import annotations

import os
from collections.abc import Set
from pathlib import Path

import psutil

SHARED_MEMORY = Path("/dev/shm")
NOTE = "segments"


def note(scratch: Path) -> None:
    """Writes down in the scratch folder which segments this process and its descendants have."""
    (scratch / f"{NOTE}.{os.getpid()}").write_text("\n".join(mapped()))


def noted(scratch: Path) -> set[str]:
    return {name for file in scratch.glob(f"{NOTE}.*") for name in file.read_text().splitlines()}


def mapped() -> set[str]:
    """Names of the segments that this process and its descendants map."""
    own = psutil.Process()
    return {name for process in [own, *own.children(recursive=True)] for name in _mapped(process.pid)}


def remove(names: Set[str]) -> None:
    for name in names:
        (SHARED_MEMORY / name).unlink(missing_ok=True)


def _mapped(pid: int) -> set[str]:
    try:
        lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return set()
    paths = {line[line.index("/") :] for line in lines if "/" in line}
    # One that was unlinked is shown with " (deleted)" at the end, and has no file.
    return {Path(path).name for path in paths if Path(path).parent == SHARED_MEMORY and Path(path).exists()}
