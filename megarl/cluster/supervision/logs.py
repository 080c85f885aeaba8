"""Log files for a run's processes, one per process."""

from __future__ import annotations

import faulthandler
import os
import sys
from pathlib import Path

from megarl.core import stacks


def log_to(path: Path) -> None:
    """Redirect this process's standard output and error, including those of native libraries, to the file."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
        os.dup2(descriptor, stream.fileno())
    os.close(descriptor)
    # Let stdout accept text with lone surrogates, as stderr does by default.
    sys.stdout.reconfigure(errors="backslashreplace")  # pyright: ignore[reportAttributeAccessIssue]  # not in TextIO
    faulthandler.enable()
    stacks.write_on_request()
