"""Named shared memory and semaphores, by which an engine's ranks talk to each other. They outlive killed processes."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Set
from pathlib import Path

import psutil

SHARED_MEMORY = Path("/dev/shm")
NOTE = "segments"


def name_semaphores(scratch: Path) -> None:
    """Semaphores that this process and its descendants make from now on are named after the scratch folder: no moment
    is left in which one exists and nobody has written it down."""
    # Where Python itself keeps the prefix, for all processes that multiprocessing starts from this one.
    multiprocessing.current_process()._config["semprefix"] = f"/{scratch.name}"


def note(scratch: Path) -> None:
    """Writes down in the scratch folder which segments this process and its descendants have."""
    (scratch / f"{NOTE}.{os.getpid()}").write_text("\n".join(mapped()))


def noted(scratch: Path) -> set[str]:
    """What was written down in the scratch folder, and what is named after it."""
    written = {name for file in scratch.glob(f"{NOTE}.*") for name in file.read_text().splitlines()}
    return written | {file.name for file in SHARED_MEMORY.glob(f"sem.{scratch.name}-*")}


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
