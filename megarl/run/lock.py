"""The lock of a run's folder, in which one driver works at a time."""

from __future__ import annotations

import errno
import fcntl
import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megarl.core.errors import UserError

NO_LOCKS = (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK)
"""Errors of a disk that is mounted without locks, as Lustre often is."""


@contextmanager
def run_lock(folder: Path) -> Iterator[None]:
    """Gives this process alone the run's folder while it is inside. The folder may be moved away or made anew there,
    because the lock's file lies beside it. The kernel releases the lock however the process ends. Raises UserError
    that names who has it."""
    file = folder.with_name(f".{folder.name}.lock")
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a+", encoding="utf-8") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            stream.seek(0)
            raise UserError(
                f"run.name={folder.name}: {folder} is in use by {stream.read() or 'another process'}; stop that run or "
                "let it end, or choose another name"
            ) from None
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise
            print(f"{file}: this disk has no locks ({error.strerror}): start no second run of this name", flush=True)
        stream.truncate(0)
        stream.write(f"process {os.getpid()} on {platform.node()}")
        stream.flush()
        yield
