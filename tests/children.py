"""Queries about processes that may exit at any time."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from multiprocessing import resource_tracker

import psutil


def matching(
    processes: Iterable[psutil.Process], condition: Callable[[psutil.Process], object]
) -> list[psutil.Process]:
    """Return the processes that meet the condition. A process that exits while it is examined does not
    meet it."""
    found = []
    for process in processes:
        with suppress(psutil.NoSuchProcess, ProcessLookupError):
            if condition(process):
                found.append(process)
    return found


class Children:
    """The children that this process starts after this object is created.

    Earlier tests may have started others that live as long as this process, such as torch's compile workers.
    """

    def __init__(self) -> None:
        self._before = set(psutil.Process().children(recursive=True))

    def __call__(self, recursive: bool = False) -> list[psutil.Process]:
        """Return the children, with their own descendants if `recursive`. multiprocessing's resource tracker, which any
        test may be the first to start, is omitted."""
        tracker = resource_tracker._resource_tracker._pid
        found = psutil.Process().children(recursive)
        return [child for child in found if child.pid != tracker and child not in self._before]
