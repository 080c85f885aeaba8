"""The interpreter for Python programs that run no user code."""

from __future__ import annotations

import sys

PYTHON = (sys.executable, "-P")
"""Start of a command line. Without -P, Python imports modules from the working directory first. Programs that run user
code start without it, because a user's file may import modules beside it."""
