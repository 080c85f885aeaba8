"""Starts of command lines for programs in this environment."""

from __future__ import annotations

import sys

PYTHON = (sys.executable, "-P")
"""Interpreter of programs that run no user code. Without -P, Python imports modules from the working directory first.
Programs that run user code start without it, because a user's file may import modules beside it."""

MEGARL = (sys.executable, "-m", "megarl.cli")
"""The command `megarl`, which need not be on PATH."""
