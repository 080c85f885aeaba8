"""Queries about processes that may exit at any time."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from multiprocessing import resource_tracker

import psutil


def matching(
    processes: Iterable[psutil.Process], condition: Callable[[psutil.Process], object]
) -> list[psutil.Process]:
    """Return the processes that meet the condition. One that exits while it is examined does not meet it."""
    found = []
    for process in processes:
        with suppress(psutil.NoSuchProcess, ProcessLookupError):
            if condition(process):
                found.append(process)
    return found


def children() -> list[psutil.Process]:
    """Return this process's children, except multiprocessing's resource tracker, which any earlier test may have
    started and which lives as long as this process."""
    tracker = resource_tracker._resource_tracker._pid
    return [child for child in psutil.Process().children() if child.pid != tracker]
