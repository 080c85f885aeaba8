"""Pause Python's garbage collector while there is no garbage to collect."""

from __future__ import annotations

import atexit
import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_collector() -> Iterator[None]:
    """Pause garbage collection. A large plan consists of a million small objects, none of them garbage; collection
    would take as long as planning."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@contextmanager
def imports() -> Iterator[None]:
    """Pause garbage collection during the import of large libraries and exempt their objects from later collections.
    Collection would account for a quarter of the import time."""
    with without_collector():
        yield
        gc.freeze()
        atexit.register(gc.unfreeze)  # some libraries count their objects at exit, and frozen ones are not listed
