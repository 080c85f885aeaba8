"""The run's scratch folder on each node, for temporary files."""

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
"""Environment variable that passes the node's scratch folder to the run's processes."""

PLACE, PREFIX, LOCK = Path("/tmp"), "megarl-", "lock"
"""Parent folder, name prefix and lock file of scratch folders. The folders are not in $TMPDIR, whose path may be too
long: socket paths are limited to 107 bytes."""


def own_scratch() -> Path:
    """Return this node's scratch folder. Only available inside `supervised`."""
    return Path(os.environ[VARIABLE])


_locks: list[IO[str]] = []
"""Open lock files for the scratch folders that this process has made."""


def make_scratch() -> Path:
    """Create a scratch folder. This process and its forks hold the folder's lock until the last of them ends."""
    folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=PLACE))
    hidden = folder / f".{LOCK}"
    lock = hidden.open("w")
    fcntl.flock(lock, fcntl.LOCK_EX)
    hidden.rename(folder / LOCK)  # so that the lock file is locked from the moment it is visible
    _locks.append(lock)
    return folder


def sweep() -> None:
    """Remove scratch folders and shared memory of this user's runs that were killed before their cleanup."""
    for folder in PLACE.glob(f"{PREFIX}*"):
        # A different run may sweep at the same time, and other users' folders cannot be opened.
        with suppress(OSError), (folder / LOCK).open() as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            segments.remove(segments.created(folder))
            shutil.rmtree(folder, ignore_errors=True)
