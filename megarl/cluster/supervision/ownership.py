"""Opens files in folders that all users share, such as /tmp, unless another user may have written the files."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

FOLDER_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
FILE_FLAGS = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
"""Flags for opening files that another user may have created. Without O_NONBLOCK, opening a FIFO would block."""


class Untrusted(Exception):
    """Raised with the reason why a file or folder cannot be trusted."""


@contextmanager
def own_folder(path: Path) -> Iterator[int]:
    """Yield a descriptor of a folder that belongs to this user. All checks apply to the open folder, so that another
    user cannot replace it. Raise Untrusted if another user owns it, and OSError if it is not a folder or cannot be
    opened."""
    folder = os.open(path, FOLDER_FLAGS)
    try:
        if os.fstat(folder).st_uid != os.geteuid():
            raise Untrusted("another user owns it")
        yield folder
    finally:
        os.close(folder)


@contextmanager
def private_folder(path: Path) -> Iterator[int]:
    """Yield a descriptor as `own_folder` does. Also raise Untrusted if other users may write to the folder."""
    with own_folder(path) as folder:
        if (mode := stat.S_IMODE(os.fstat(folder).st_mode)) & 0o022:
            raise Untrusted(f"other users may write to it (mode {mode:o})")
        yield folder


@contextmanager
def open_file(name: str, folder: int, flags: int = os.O_RDONLY) -> Iterator[int]:
    """Open or create a regular file of this user, by its name in an open folder, and yield the descriptor. Raise
    Untrusted if it is not a regular file of this user, and OSError if it is a link or cannot be opened."""
    file = os.open(name, flags | FILE_FLAGS, 0o600, dir_fd=folder)
    try:
        status = os.fstat(file)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
            raise Untrusted(f"{name} is not a regular file of this user")
        yield file
    finally:
        os.close(file)
