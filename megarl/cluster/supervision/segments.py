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
    """Names semaphores that this process and its descendants make from now on after the scratch folder, so that at no
    moment one exists that nobody has written down."""
    # Python keeps the prefix there, for all processes that multiprocessing starts from this one.
    multiprocessing.current_process()._config["semprefix"] = f"/{scratch.name}"


def note(scratch: Path) -> None:
    """Writes down in the scratch folder which segments this process and its descendants have."""
    (scratch / f"{NOTE}.{os.getpid()}").write_text("\n".join(mapped()))


def noted(scratch: Path) -> set[str]:
    """Returns the names that were written down in the scratch folder, and those that begin with its name."""
    written = {name for file in scratch.glob(f"{NOTE}.*") for name in file.read_text().splitlines()}
    return written | {file.name for file in SHARED_MEMORY.glob(f"sem.{scratch.name}-*")}


def mapped() -> set[str]:
    """Returns the names of the segments that this process and its descendants map."""
    this_process = psutil.Process()
    return {name for process in [this_process, *this_process.children(recursive=True)] for name in _mapped(process.pid)}


def remove(names: Set[str]) -> None:
    for name in names:
        (SHARED_MEMORY / name).unlink(missing_ok=True)


def _mapped(pid: int) -> set[str]:
    try:
        lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    except OSError:  # the process has ended, or may not be read
        return set()
    paths = {line[line.index("/") :] for line in lines if "/" in line}
    # A segment that was unlinked is shown with " (deleted)" at the end, and has no file.
    return {Path(path).name for path in paths if Path(path).parent == SHARED_MEMORY and Path(path).exists()}
