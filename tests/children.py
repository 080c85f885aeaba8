"""The child processes of the test process."""

from __future__ import annotations

from multiprocessing import resource_tracker

import psutil


def children() -> list[psutil.Process]:
    """Return this process's children, except multiprocessing's resource tracker, which any earlier test may have
    started and which lives as long as this process."""
    tracker = resource_tracker._resource_tracker._pid
    return [child for child in psutil.Process().children() if child.pid != tracker]
