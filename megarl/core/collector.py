"""Pauses Python's search for garbage where it finds none."""

from __future__ import annotations

import atexit
import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_collector() -> Iterator[None]:
    """Pauses the search. A large plan is a million small objects, none of them garbage, and the search takes as long as
    planning."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@contextmanager
def imports() -> Iterator[None]:
    """Pauses the search while it imports large libraries, of which it would be a quarter of the time, and leaves their
    objects out of all searches to come."""
    with without_collector():
        yield
        gc.freeze()
        atexit.register(gc.unfreeze)  # for libraries that count at the end what is left of theirs
