"""Named shared memory and semaphores for communication between an engine's ranks. They outlive killed processes.

Libraries choose the names, so a run identifies its own segments by three conditions: a process in the run maps the
segment, the segment did not exist before the run, and no other process uses it after the run. A segment that a process
only opened, such as a server's segment, fails one of these conditions.
"""

from __future__ import annotations

import multiprocessing
import os
import re
import stat
from collections.abc import Iterable, Set
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import psutil

from megarl.cluster.supervision.ownership import Untrusted, open_file, private_folder
from megarl.cluster.supervision.processes import descendants

SHARED_MEMORY = Path("/dev/shm")
EARLIER = "earlier_segments"
NOTE = "segments"
NOTE_NAME = re.compile(rf"{NOTE}\.[0-9]{{1,10}}")

SEGMENT_NAME = re.compile(r"(?!\.{1,2}$)[^/\n\0]{1,255}")
"""Names of segments that a run may remove: file names directly in /dev/shm. Each line of a note contains one."""

NOTE_LINE = re.compile(rf"(?P<inode>[0-9]{{1,20}}) (?P<name>{SEGMENT_NAME.pattern})")


class Segment(NamedTuple):
    """A segment, identified by name and inode, because another program may reuse the name."""

    inode: int
    name: str


def note_earlier(scratch: Path) -> None:
    """List the segments that exist before the run in a file in the scratch folder."""
    _write(scratch, EARLIER, _existing(file.name for file in SHARED_MEMORY.iterdir()))


def name_semaphores(scratch: Path) -> None:
    """Make this process and its descendants name new semaphores after the scratch folder. Such semaphores can be
    removed even if the process is killed before it records them."""
    process = multiprocessing.current_process()  # child processes inherit its config
    process._config["semprefix"] = f"/{scratch.name}"  # pyright: ignore[reportAttributeAccessIssue]  # not in typeshed


def note(scratch: Path) -> None:
    """List the segments that this process and its descendants map in a file in the scratch folder."""
    _write(scratch, f"{NOTE}.{os.getpid()}", mapped())


def mapped() -> set[Segment]:
    """Return the segments that this process and its descendants map."""
    family = [os.getpid(), *descendants()]
    return _existing(name for pid in family for name in _mapped_names(pid))


def created(scratch: Path, mapped_at_end: Set[Segment] = frozenset()) -> set[Segment]:
    """Return the segments that the run created; empty if the scratch folder is gone or new. A segment belongs to the
    run if one of the run's processes recorded it, if one of them still maps it at the end of the run, or if it is named
    after the scratch folder. Segments that existed before the run are excluded. Raise Untrusted if this module cannot
    have written the folder or a file in it."""
    try:
        with private_folder(scratch) as folder:
            earlier = _read(EARLIER, folder)
            notes = [_read(name, folder) for name in filter(NOTE_NAME.fullmatch, os.listdir(folder))]
    except FileNotFoundError:
        return set()
    named = _existing(file.name for file in SHARED_MEMORY.glob(f"sem.{scratch.name}-*"))
    return set(mapped_at_end).union(named, *notes) - earlier


def remove(segments: Set[Segment]) -> None:
    """Remove the segments that no other process uses."""
    unused = segments - _used() if segments else set()
    for segment in unused & _existing(segment.name for segment in segments):
        with suppress(OSError):  # continue with the next one if this one cannot be removed
            (SHARED_MEMORY / segment.name).unlink()


def _existing(names: Iterable[str]) -> set[Segment]:
    """Return the existing segments with these names that belong to this user."""
    existing = set()
    for name in filter(SEGMENT_NAME.fullmatch, set(names)):
        with suppress(OSError):
            status = (SHARED_MEMORY / name).stat(follow_symlinks=False)
            if status.st_uid == os.geteuid() and stat.S_ISREG(status.st_mode):
                existing.add(Segment(status.st_ino, name))
    return existing


def _used() -> set[Segment]:
    """Return the segments that readable processes other than this one map or hold open."""
    others = set(psutil.pids()) - {os.getpid()}
    return _existing(name for pid in others for name in (*_mapped_names(pid), *_open_names(pid)))


def _mapped_names(pid: int) -> set[str]:
    try:
        lines = Path(f"/proc/{pid}/maps").read_text(errors="surrogateescape").splitlines()
    except OSError:  # the process has exited or is not readable
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


def _write(scratch: Path, name: str, segments: Set[Segment]) -> None:
    lines = "".join(f"{segment.inode} {segment.name}\n" for segment in segments)
    with private_folder(scratch) as folder:
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
        with open_file(f".{name}", folder, flags) as file, open(file, "wb", closefd=False) as stream:
            stream.write(lines.encode(errors="surrogateescape"))
        # Rename, so that a writer that is killed does not leave a partial note.
        os.rename(f".{name}", name, src_dir_fd=folder, dst_dir_fd=folder)


def _read(name: str, folder: int) -> set[Segment]:
    with open_file(name, folder) as file, open(file, encoding="utf-8", errors="surrogateescape", closefd=False) as text:
        lines = text.read().split("\n")
    matches = [NOTE_LINE.fullmatch(line) for line in lines[:-1]]
    if lines[-1] or None in matches:
        raise Untrusted(f"{name} is not a list of segments")
    return {Segment(int(match["inode"]), match["name"]) for match in matches if match}
