"""The end of a process with its parent."""

from __future__ import annotations

import ctypes

_PR_SET_PDEATHSIG = 1


def signal_with_parent(number: int) -> None:
    """Makes the kernel send this process a signal when the parent's thread that started it ends, however that
    happens."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)
