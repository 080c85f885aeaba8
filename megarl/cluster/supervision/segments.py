"""Named shared memory and semaphores, which an engine's ranks use to communicate. They outlive killed processes.

Libraries choose the names, so a run identifies its own segments by three conditions: a process in the run maps the
segment, the segment did not exist before the run, and no other process uses it after the run. A segment that a process
only opened, such as a server's segment, fails one of these conditions.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterable, Set
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import psutil

from megarl.cluster.supervision.processes import descendants

SHARED_MEMORY = Path("/dev/shm")
EARLIER = "earlier_segments"
NOTE = "segments"


class Segment(NamedTuple):
    """A segment, identified by name and inode because a different program may reuse the name."""

    inode: int
    name: str


def note_earlier(scratch: Path) -> None:
    """Record in the scratch folder which segments exist before the run."""
    _write(scratch / EARLIER, _existing(file.name for file in SHARED_MEMORY.iterdir()))


def name_semaphores(scratch: Path) -> None:
    """Make this process and its descendants name new semaphores after the scratch folder. Such semaphores can be
    removed even if the process is killed before it records them."""
    process = multiprocessing.current_process()  # passes its config to all processes that it starts
    process._config["semprefix"] = f"/{scratch.name}"  # pyright: ignore[reportAttributeAccessIssue]  # not in typeshed


def note(scratch: Path) -> None:
    """Record in the scratch folder which segments this process and its descendants map."""
    _write(scratch / f"{NOTE}.{os.getpid()}", mapped())


def mapped() -> set[Segment]:
    """Return the segments that this process and its descendants map."""
    family = [os.getpid(), *descendants()]
    return _existing(name for pid in family for name in _mapped_names(pid))


def created(scratch: Path, mapped_at_end: Set[Segment] = frozenset()) -> set[Segment]:
    """Return the segments that the run created; empty if the scratch folder is gone. A segment belongs to the run if
    one of the run's processes recorded it, if one of them still maps it at the end of the run, or if it is named after
    the scratch folder. Segments that existed before the run are excluded."""
    if not (scratch / EARLIER).exists():
        return set()
    noted = {segment for file in scratch.glob(f"{NOTE}.*") for segment in _read(file)}
    named = _existing(file.name for file in SHARED_MEMORY.glob(f"sem.{scratch.name}-*"))
    return (noted | named | mapped_at_end) - _read(scratch / EARLIER)


def remove(segments: Set[Segment]) -> None:
    """Remove the segments that no other process uses."""
    unused = segments - _used() if segments else set()
    for segment in unused & _existing(segment.name for segment in segments):
        with suppress(OSError):  # continue with the next one if this one cannot be removed
            (SHARED_MEMORY / segment.name).unlink()


def _existing(names: Iterable[str]) -> set[Segment]:
    """Return the existing segments with these names that belong to this user."""
    existing = set()
    for name in set(names):
        with suppress(OSError):
            status = (SHARED_MEMORY / name).stat(follow_symlinks=False)
            if status.st_uid == os.geteuid():
                existing.add(Segment(status.st_ino, name))
    return existing


def _used() -> set[Segment]:
    """Return the segments that readable processes other than this one map or hold open."""
    others = set(psutil.pids()) - {os.getpid()}
    return _existing(name for pid in others for name in (*_mapped_names(pid), *_open_names(pid)))


def _mapped_names(pid: int) -> set[str]:
    try:
        lines = Path(f"/proc/{pid}/maps").read_text(errors="surrogateescape").splitlines()
    except OSError:  # the process has ended or is not readable
        return set()
    return _names(line[line.index("/") :] for line in lines if "/" in line)


def _open_names(pid: int) -> set[str]:
    paths = []
    with suppress(OSError):
        for file in os.scandir(f"/proc/{pid}/fd"):
            with suppress(OSError):
                paths.append(os.readlink(file))
    return _names(paths)


def _names(paths: Iterable[str]) -> set[str]:
    # An unlinked segment is listed with the suffix " (deleted)" and has no file.
    return {Path(path).name for path in paths if Path(path).parent == SHARED_MEMORY}


def _write(file: Path, segments: Set[Segment]) -> None:
    lines = (f"{segment.inode} {segment.name}\n" for segment in segments)
    new = file.with_name(f".{file.name}")
    new.write_text("".join(lines), encoding="utf-8", errors="surrogateescape")
    new.replace(file)  # never leaves a partial file, even if the writer is killed


def _read(file: Path) -> set[Segment]:
    lines = file.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    return {Segment(int(inode), name) for inode, name in (line.split(" ", 1) for line in lines)}
