"""Keep write errors on stdout and stderr from ending a run."""

from __future__ import annotations

import errno
import os
import sys
from typing import Any, TextIO


def escape_unencodable() -> None:
    """Escape characters that a terminal cannot encode, as in \\u2192, instead of raising UnicodeError."""
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="backslashreplace")  # pyright: ignore[reportAttributeAccessIssue]  # it is a TextIOWrapper


def tolerate_lost_readers() -> None:
    """Drop this process's output once its reader is gone, and lines that do not fit on a full disk."""
    sys.stdout, sys.stderr = _Tolerant(sys.stdout), _Tolerant(sys.stderr)


class _Tolerant:
    def __init__(self, stream: TextIO):
        self._stream = stream

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except OSError as error:
            self._give_up(error)
            return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError as error:
            self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            return  # keep the stream: later lines may fit
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, self._stream.fileno())  # redirects child processes and the flush at exit
        os.close(null)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
