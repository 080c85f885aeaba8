"""The lock of a run's folder, in which one driver works at a time."""

from __future__ import annotations

import errno
import fcntl
import os
import platform
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from megarl.core.errors import UserError

POLL_S = 1.0
NO_LOCKS = (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK)
"""Errors of a disk that is mounted without locks, as Lustre often is."""


@contextmanager
def run_lock(folder: Path, patience_s: float = 0.0) -> Iterator[None]:
    """Give this process alone the run's folder while it is inside. The folder may be moved away or made anew there,
    because the lock's file lies beside it. The kernel releases the lock however the process ends; that of a node that
    is lost is known to be free on others after a while only, which patience_s may bridge.

    Raise UserError that names who has it, and for a place where no file can be made.
    """
    file = folder.with_name(f".{folder.name}.lock")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        opened = file.open("a+", encoding="utf-8")
    except OSError as error:
        raise UserError(
            f"run.folder={folder.parent}: it cannot be written ({error.strerror}: {error.filename}); set run.folder to "
            "a folder of yours"
        ) from None
    with opened as stream:
        deadline = time.monotonic() + patience_s
        while not _lock(stream):
            if time.monotonic() >= deadline:
                stream.seek(0)
                raise UserError(
                    f"run.name={folder.name}: {folder} is in use by {stream.read() or 'another process'}; stop that "
                    "run or let it end, or choose another name"
                )
            time.sleep(POLL_S)
        stream.truncate(0)
        stream.write(f"process {os.getpid()} on {platform.node()}")
        stream.flush()
        yield


def _lock(stream: IO[str]) -> bool:
    """Return whether the file is this process's now; so it is taken to be on a disk without locks."""
    try:
        fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
        print(f"{stream.name}: this disk has no locks ({error.strerror}): start no second run of this name", flush=True)
    return True
