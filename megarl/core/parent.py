"""Tie a process's lifetime to its parent's."""

from __future__ import annotations

import ctypes

_PR_SET_PDEATHSIG = 1


def signal_with_parent(number: int) -> None:
    """Make the kernel send this process a signal when the parent thread that started it exits for any reason."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)
