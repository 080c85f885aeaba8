"""The log files of a run, one for each process."""

from __future__ import annotations

import faulthandler
import os
import sys
from pathlib import Path

from megarl.core import stacks


def log_to(path: Path) -> None:
    """Sends standard output and error of this process, its libraries' included, to the file from now on."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
        os.dup2(descriptor, stream.fileno())
    os.close(descriptor)
    sys.stdout.reconfigure(errors="backslashreplace")  # as standard error: texts may hold what UTF-8 cannot carry
    faulthandler.enable()
    stacks.write_on_request()
