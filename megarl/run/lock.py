"""The lock that allows only one driver at a time to use a run folder."""

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
"""Error codes from file systems that are mounted without lock support, which is common for Lustre."""

FLAGS = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
"""Flags that reject links. Another user may create one in a shared folder, and the lock file is overwritten."""


@contextmanager
def run_lock(folder: Path, patience_s: float = 0.0) -> Iterator[None]:
    """Hold the exclusive lock for a run folder inside the context. The lock file is next to the folder, so the folder
    itself may be moved or recreated. The kernel releases the lock when the process exits. After a node failure, a
    network file system may take some time to release the lock. Wait up to `patience_s` seconds for the lock. Raise
    UserError if another process still holds it, or the lock file cannot be created."""
    file = folder.with_name(f".{folder.name}.lock")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        opened = os.fdopen(os.open(file, FLAGS, 0o666), "a+", encoding="utf-8")
    except OSError as error:
        raise UserError(
            f"run.folder={folder.parent}: not writable ({error.strerror or error}: {error.filename or file}). Fix: set "
            "run.folder to a writable folder"
        ) from None
    with opened as stream:
        deadline = time.monotonic() + patience_s
        while not _lock(stream, file):
            if time.monotonic() >= deadline:
                stream.seek(0)
                raise UserError(
                    f"run.name={folder.name}: {folder} is in use by {stream.read() or 'another process'}. Fix: wait "
                    "for that run, stop it, or set a different run.name"
                )
            time.sleep(POLL_S)
        stream.truncate(0)
        stream.write(f"process {os.getpid()} on {platform.node()}")
        stream.flush()
        yield


def _lock(stream: IO[str], file: Path) -> bool:
    """Try to lock the file. Return False if another process holds the lock. Print a warning and return True if the file
    system does not support locks."""
    try:
        fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
        warning = f"this file system has no file locks ({error.strerror}). Do not start a second run with this name"
        print(f"{file}: {warning}", flush=True)
    return True
