"""The interpreter for Python programs that megarl starts."""

from __future__ import annotations

import os
import sys
from pathlib import Path

PYTHON = (sys.executable, "-P")
"""Start of a command line. Without -P, Python imports modules from the working directory first. That may be a folder
such as /tmp, in which other users can create files, or a run folder from a third party."""

VARIABLE, MARK = "PYTHONSAFEPATH", "megarl"
"""Environment variable with the effect of -P, and megarl's value. Ray's workers and the processes that libraries spawn
need it, because other programs start them."""

ROOT = Path(__file__).parents[2]


def protect_children() -> None:
    """Make Python programs that this process and its descendants start not import modules from the working directory.
    Processes for user code are excluded, because its own programs may do so."""
    os.environ.setdefault(VARIABLE, MARK)


def keep_importable() -> None:
    """Let child processes import megarl if this process runs in a checkout that is not installed."""
    if Path.cwd() == ROOT:
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(ROOT)]))
