"""The Python stacks of a process, whatever it is busy with, for another process that has waited for it too long."""

from __future__ import annotations

import faulthandler
import signal

SIGNAL = signal.SIGUSR2


def write_on_request() -> None:
    """Makes this process answer SIGNAL, from now on, with the stacks of all its threads on its standard error."""
    faulthandler.register(SIGNAL, all_threads=True)
