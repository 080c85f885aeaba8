"""The lock that allows only one driver at a time to use a run folder."""

from __future__ import annotations

import errno
import fcntl
import os
import platform
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from megarl.core.errors import UserError

POLL_S = 1.0
NO_LOCKS = (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK)
"""Error codes from file systems that are mounted without lock support, which is common for Lustre."""

FLAGS = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
"""Flags that reject links. In a shared folder, another user could create a link whose target would be overwritten."""


HOLDER_CHARACTERS = 200
"""Maximum number of characters from a lock file in an error message."""


@contextmanager
def run_lock(folder: Path, patience_s: float = 0.0) -> Iterator[None]:
    """Hold the exclusive lock for a run folder inside the context. The lock file is next to the folder, so the folder
    itself may be moved or recreated. Only the owner can open the lock file, because a user who can read a file can also
    lock it. The kernel releases the lock when the process exits. After a node failure, a network file system may take
    some time to release the lock. Wait up to `patience_s` seconds for the lock. Raise UserError if another process
    still holds it, or the lock file cannot be created."""
    file = folder.with_name(f".{folder.name}.lock")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        opened = os.fdopen(_open(file), "r+", encoding="utf-8", errors="replace")
    except OSError as error:
        raise UserError(
            f"run.folder={folder.parent}: not writable ({error.strerror or error}: {error.filename or file}). Fix: set "
            "run.folder to a writable folder"
        ) from None
    with opened as stream:
        deadline = time.monotonic() + patience_s
        while not _lock(stream, file):
            if time.monotonic() >= deadline:
                raise UserError(
                    f"run.name={folder.name}: {folder} is in use by {_holder(stream)}. Fix: wait for that run, "
                    "stop it, or set a different run.name"
                )
            time.sleep(POLL_S)
        stream.truncate(0)
        stream.write(f"process {os.getpid()} on {platform.node()}")
        stream.flush()
        yield


def _open(file: Path) -> int:
    """Open the lock file, or create it. Raise UserError if it is not a regular file of this user, because another owner
    could let any user lock it."""
    descriptor = os.open(file, FLAGS, 0o600)
    try:
        status = os.fstat(descriptor)
        is_own = status.st_uid == os.geteuid() or status.st_uid == _uid_of_new_files(file.parent)
        if not stat.S_ISREG(status.st_mode) or not is_own:
            raise UserError(f"{file}: not a regular file of this user. Fix: remove it, or set a different run.name")
        os.fchmod(descriptor, 0o600)  # earlier versions of megarl created the file with more permissions
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _uid_of_new_files(folder: Path) -> int:
    """Return the owner of files that this process creates. Some network file systems replace the user id."""
    with tempfile.TemporaryFile(dir=folder) as file:
        return os.fstat(file.fileno()).st_uid


def _holder(stream: IO[str]) -> str:
    """Return the process that holds the lock, from the kernel if it runs on this node, otherwise from the file."""
    inode = os.fstat(stream.fileno()).st_ino
    with suppress(OSError):
        for line in Path("/proc/locks").read_text().splitlines():
            fields = line.split()
            if "->" not in fields and fields[1] == "FLOCK" and fields[5].endswith(f":{inode}") and int(fields[4]) > 0:
                return f"process {fields[4]} on {platform.node()}"
    stream.seek(0)
    return " ".join(stream.read(HOLDER_CHARACTERS).split()) or "another process"


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
