"""Dump a process's stacks when another process has waited too long for it."""

from __future__ import annotations

import faulthandler
import signal

SIGNAL = signal.SIGUSR2


def write_on_request() -> None:
    """Make this process print the stacks of all its threads to stderr whenever it receives SIGNAL."""
    faulthandler.register(SIGNAL, all_threads=True)
