"""Named shared memory and semaphores, by which an engine's ranks talk to each other. They outlive killed processes.

The libraries that make them choose the names, so a run knows its own by other signs: a process of the run maps it, it
did not exist before the run, and when the run's processes are gone nobody else uses it. Segments that a process has
merely opened, such as those of a server, lack one of these.
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
    """A segment by its name and the number of its inode: another program may use the name again."""

    inode: int
    name: str


def note_earlier(scratch: Path) -> None:
    """Write down in the scratch folder which segments exist before the run."""
    _write(scratch / EARLIER, _existing(file.name for file in SHARED_MEMORY.iterdir()))


def name_semaphores(scratch: Path) -> None:
    """Names semaphores that this process and its descendants make from now on after the scratch folder, so that at no
    moment one exists that nobody has written down."""
    # Python keeps the prefix there, for all processes that multiprocessing starts from this one.
    multiprocessing.current_process()._config["semprefix"] = f"/{scratch.name}"


def note(scratch: Path) -> None:
    """Write down in the scratch folder which segments this process and its descendants have."""
    _write(scratch / f"{NOTE}.{os.getpid()}", mapped())


def mapped() -> set[Segment]:
    """Return the segments that this process and its descendants map."""
    family = [os.getpid(), *descendants()]
    return _existing(name for pid in family for name in _mapped_names(pid))


def made(scratch: Path, mapped_at_end: Set[Segment] = frozenset()) -> set[Segment]:
    """Return the segments that did not exist before the run, of those that its processes have noted or had mapped at
    its end, and those that are named after the scratch folder. There are none if the folder is gone."""
    if not (scratch / EARLIER).exists():
        return set()
    noted = {segment for file in scratch.glob(f"{NOTE}.*") for segment in _read(file)}
    named = _existing(file.name for file in SHARED_MEMORY.glob(f"sem.{scratch.name}-*"))
    return (noted | named | mapped_at_end) - _read(scratch / EARLIER)


def remove(segments: Set[Segment]) -> None:
    """Removes those that no other process uses."""
    unused = segments - _used() if segments else set()
    for segment in unused & _existing(segment.name for segment in segments):
        with suppress(OSError):  # one that cannot be removed keeps no other
            (SHARED_MEMORY / segment.name).unlink()


def _existing(names: Iterable[str]) -> set[Segment]:
    """Return the segments with these names that exist and are this user's."""
    found = set()
    for name in set(names):
        with suppress(OSError):
            status = (SHARED_MEMORY / name).stat(follow_symlinks=False)
            if status.st_uid == os.geteuid():
                found.add(Segment(status.st_ino, name))
    return found


def _used() -> set[Segment]:
    """Return the segments that other processes of this machine, as far as they may be read, map or hold open."""
    others = set(psutil.pids()) - {os.getpid()}
    return _existing(name for pid in others for name in (*_mapped_names(pid), *_open_names(pid)))


def _mapped_names(pid: int) -> set[str]:
    try:
        lines = Path(f"/proc/{pid}/maps").read_text(errors="surrogateescape").splitlines()
    except OSError:  # the process has ended, or may not be read
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
    # A segment that was unlinked is shown with " (deleted)" at the end, and has no file.
    return {Path(path).name for path in paths if Path(path).parent == SHARED_MEMORY}


def _write(file: Path, segments: Set[Segment]) -> None:
    lines = (f"{segment.inode} {segment.name}\n" for segment in segments)
    new = file.with_name(f".{file.name}")
    new.write_text("".join(lines), encoding="utf-8", errors="surrogateescape")
    new.replace(file)  # whole, whenever its writer is killed


def _read(file: Path) -> set[Segment]:
    lines = file.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    return {Segment(int(inode), name) for inode, name in (line.split(" ", 1) for line in lines)}
