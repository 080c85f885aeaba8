"""The folder on each node for files of a run that are not needed after it."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import IO

from megarl.cluster.supervision import segments

VARIABLE = "MEGARL_SCRATCH"
"""The variable by which the processes that a node's supervisor starts know the node's folder."""

PLACE, PREFIX, LOCK = Path("/tmp"), "megarl-", "lock"
"""The folders are not in $TMPDIR, which may be long: paths of the sockets in them are limited to 107 bytes."""


def own_scratch() -> Path:
    """Return the folder of the node that this process is on, inside `supervised`."""
    return Path(os.environ[VARIABLE])


_locks: list[IO[str]] = []
"""The open locks of this process's folders."""


def make_scratch() -> Path:
    """Make a folder, whose lock this process and those that it forks hold until the last of them ends."""
    folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=PLACE))
    hidden = folder / f".{LOCK}"
    lock = hidden.open("w")
    fcntl.flock(lock, fcntl.LOCK_EX)
    hidden.rename(folder / LOCK)  # whoever sees it finds it locked
    _locks.append(lock)
    return folder


def sweep() -> None:
    """Removes the folders of this user's runs of which no process is left, with the shared memory that they made: those
    of runs that were killed before they could do so themselves."""
    for folder in PLACE.glob(f"{PREFIX}*"):
        # Another run may sweep at the same time, and another user's folder cannot be opened.
        with suppress(OSError), (folder / LOCK).open() as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            segments.remove(segments.made(folder))
            shutil.rmtree(folder, ignore_errors=True)
