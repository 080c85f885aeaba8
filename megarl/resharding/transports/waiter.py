"""Run blocking waits that can be abandoned."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import Empty, SimpleQueue


class Waiter:
    """A daemon thread that runs blocking waits one after another while its owner does other work.

    An abandoned wait blocks the thread until the wait ends, but does not keep the process alive.
    """

    def __init__(self) -> None:
        self._waits: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._ends: SimpleQueue[BaseException | None] = SimpleQueue()
        threading.Thread(target=self._run, daemon=True).start()

    def begin(self, wait: Callable[[], None]) -> None:
        self._waits.put(wait)

    def is_pending(self, seconds: float) -> bool:
        """Block until the wait ends, for at most `seconds`. Return whether it is still pending. Re-raise its error."""
        try:
            error = self._ends.get(timeout=seconds)
        except Empty:
            return True
        if error is not None:
            raise error
        return False

    def close(self) -> None:
        """Stop the thread once its current wait ends."""
        self._waits.put(None)

    def _run(self) -> None:
        while (wait := self._waits.get()) is not None:
            try:
                wait()
            except BaseException as error:
                self._ends.put(error)  # is_pending re-raises it in the owner's thread
            else:
                self._ends.put(None)
