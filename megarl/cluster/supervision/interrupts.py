"""The signals that end a run, as the driver takes them: at once, or at its next safe point if that is near."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import count

REPEAT_S = 1.0
"""The time in which a second signal is the same as the first: who signals all processes of a run reaches the driver
twice, directly and by its parent."""


class Interrupts:
    """The signals of one process. The first raises KeyboardInterrupt, and those that follow nothing more, so that they
    do not interrupt the clean-up. Inside `grace` the run has a time to end by itself."""

    def __init__(self) -> None:
        self._driver = self._parent = 0
        self._number_of_signal = count()
        """Tells the first one, also where a second signal is handled in the middle of its handler."""
        self._told_at: float | None = None
        self._grace_s = 0.0
        self._is_awaited = False
        """Whether the first signal lets the body of `grace` go on."""
        self._can_cut_short = False
        """Whether a later signal, or the end of the grace time, raises KeyboardInterrupt."""

    @property
    def is_told(self) -> bool:
        """Whether a signal has told the run to end."""
        return self._told_at is not None

    @property
    def left_s(self) -> float:
        """The rest of the grace time: after a second signal, none."""
        return max(0.0, self._told_at + self._grace_s - time.monotonic()) if self._can_cut_short else 0.0

    def listen(self, signals: Iterable[int]) -> None:
        """Takes these signals from now on. Forked processes that go on with its code end by theirs as any other."""
        self._driver, self._parent = os.getpid(), os.getppid()
        for number in signals:
            signal.signal(number, self._hear)
        signal.signal(signal.SIGALRM, self._hear)

    @contextmanager
    def grace(self, seconds: float, is_awaited: bool) -> Iterator[None]:
        """Gives the body so many seconds from the first signal to its end; then, or at a second signal, it gets a
        KeyboardInterrupt. is_awaited: the first signal does not interrupt it, but sets is_told, which it looks at."""
        self._grace_s, self._is_awaited, self._can_cut_short = seconds, is_awaited, True
        try:
            yield
        finally:
            self._is_awaited = self._can_cut_short = False
            signal.setitimer(signal.ITIMER_REAL, 0)

    def expire(self) -> None:
        """End the grace time, for a thread that has found out that it is of no use."""
        os.kill(self._driver, signal.SIGALRM)

    def _hear(self, number: int, _) -> None:
        if os.getpid() != self._driver:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        elif number != signal.SIGALRM and next(self._number_of_signal) == 0:
            self._begin()
        elif self._told_at is None or not self._can_cut_short:
            return
        elif number == signal.SIGALRM or time.monotonic() - self._told_at >= REPEAT_S:
            self._can_cut_short = False
            raise KeyboardInterrupt

    def _begin(self) -> None:
        self._told_at = time.monotonic()
        if self._can_cut_short and self._grace_s > 0:
            signal.setitimer(signal.ITIMER_REAL, self._grace_s)
            if self._is_awaited and os.getppid() == self._parent:  # else the signal says that the parent is lost
                # Not by print, whose buffer the interrupted code may be just writing to.
                grace = f"checkpoint.grace_s={self._grace_s:g} s"
                line = f"interrupted; saves after the step under way, if within {grace}; a second signal ends the run"
                os.write(1, f"{line} at once\n".encode())
                return
        raise KeyboardInterrupt


interrupts = Interrupts()
"""Those of the driver, where `listen` was called."""
