"""Commands for running Python and megarl in this environment."""

from __future__ import annotations

import sys

PYTHON = (sys.executable, "-P")
"""Interpreter for programs that run no user code. Without -P, Python searches the working directory for modules first.
Programs that run user code omit -P, because a user's file may import modules from the working directory."""

MEGARL = (sys.executable, "-m", "megarl.cli")
"""The `megarl` command, even if it is not on PATH."""
