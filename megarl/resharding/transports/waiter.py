"""Waits in a way that can be given up."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import Empty, SimpleQueue


class Waiter:
    """A thread that waits for one thing after the other, while its owner may look after something else.

    Where a wait is given up, the thread goes on in vain until it is over, and keeps nobody from ending.
    """

    def __init__(self) -> None:
        self._waits: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._ends: SimpleQueue[BaseException | None] = SimpleQueue()
        threading.Thread(target=self._run, daemon=True).start()

    def begin(self, wait: Callable[[], None]) -> None:
        self._waits.put(wait)

    def goes_on(self, seconds: float) -> bool:
        """Returns whether the wait goes on after `seconds`, or sooner that it has ended. Raises the error that has
        ended it."""
        try:
            error = self._ends.get(timeout=seconds)
        except Empty:
            return True
        if error is not None:
            raise error
        return False

    def close(self) -> None:
        """Ends the thread, after what it still waits for."""
        self._waits.put(None)

    def _run(self) -> None:
        while (wait := self._waits.get()) is not None:
            try:
                wait()
            except BaseException as error:
                self._ends.put(error)  # for the thread that goes on
            else:
                self._ends.put(None)
