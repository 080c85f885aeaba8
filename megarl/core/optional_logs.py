"""Logs that a run can do without. They never stop a run: if the disk is full, rows are dropped with one warning."""

from __future__ import annotations

import errno
import shutil
import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from megarl.core.files import append_rows

RESERVED_BYTES = 2**28
"""Free disk space in bytes that is reserved for checkpoints and other files. With less, logs are dropped."""


class OptionalLog:
    """An optional log in one or more files. Rows are dropped while the disk is full, and logging resumes once there is
    space."""

    def __init__(self, rows: str):
        """rows: plural noun for the log's contents, used in messages."""
        self._rows, self._num_dropped = rows, 0

    def append(self, path: Path, rows: Iterable[Any], count: int) -> bool:
        """Append `count` values as lines of JSON, all or none. Return whether they were written."""
        return self.attempt(path, lambda: append_rows(path, rows), count)

    def attempt(self, path: Path, write: Callable[[], object], count: int = 1) -> bool:
        """Write to a file with the caller's function. If it fails, count `count` rows as dropped."""
        try:
            if shutil.disk_usage(path.parent).free < RESERVED_BYTES:
                raise OSError(errno.ENOSPC, f"less than {RESERVED_BYTES >> 20} MiB of disk space is free")
            write()
        except OSError as error:
            if not self._num_dropped:
                warning = f"{path.parent}: cannot be written ({error.strerror}). The run continues without the"
                _print(f"megarl: warning: {warning} {self._rows}. Fix: free some disk space")
            self._num_dropped += count
            return False
        if self._num_dropped:
            _print(f"megarl: note: {path.parent}: writable again; {self._num_dropped} {self._rows} were dropped")
            self._num_dropped = 0
        return True


def _print(text: str) -> None:
    with suppress(OSError):  # stderr may be a file on the full disk
        print(text, file=sys.stderr, flush=True)
