"""Handle signals that end a run: the driver stops at once, or at its next safe point within a grace period."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import count

REPEAT_S = 1.0
"""A second signal within this many seconds after the first counts as the same signal. A signal to all processes in a
run reaches the driver twice: directly and through its parent."""


class Interrupts:
    """The signal handling in one process. The first signal raises KeyboardInterrupt. Later signals are ignored, so that
    they do not interrupt cleanup. Inside `grace`, the run has a grace period to end by itself."""

    def __init__(self) -> None:
        self._driver = self._parent = 0
        self._number_of_signal = count()
        """Counter that identifies the first signal, even if a second one interrupts its handler."""
        self._signaled_at: float | None = None
        self._grace_s = 0.0
        self._is_awaited = False
        """Whether the body of `grace` continues running after the first signal."""
        self._can_cut_short = False
        """Whether a later signal, or the end of the grace period, raises KeyboardInterrupt."""

    @property
    def is_signaled(self) -> bool:
        """Whether a signal to end the run has arrived."""
        return self._signaled_at is not None

    @property
    def left_s(self) -> float:
        """Seconds left in the grace period; 0 before the first signal and after a second one."""
        if self._signaled_at is None or not self._can_cut_short:
            return 0.0
        return max(0.0, self._signaled_at + self._grace_s - time.monotonic())

    def listen(self, signals: Iterable[int]) -> None:
        """Install handlers for these signals. Processes forked later use the default action."""
        self._driver, self._parent = os.getpid(), os.getppid()
        for number in signals:
            signal.signal(number, self._handle)
        signal.signal(signal.SIGALRM, self._handle)

    @contextmanager
    def grace(self, seconds: float, is_awaited: bool) -> Iterator[None]:
        """Give the body a grace period after the first signal. KeyboardInterrupt is raised in the body when the period
        is over or a second signal arrives. `is_awaited`: whether the body checks `is_signaled` itself; otherwise, the
        first signal also raises KeyboardInterrupt."""
        self._grace_s, self._is_awaited, self._can_cut_short = seconds, is_awaited, True
        try:
            yield
        finally:
            self._is_awaited = self._can_cut_short = False
            signal.setitimer(signal.ITIMER_REAL, 0)

    def expire(self) -> None:
        """End the grace period early. May be called from any thread."""
        os.kill(self._driver, signal.SIGALRM)

    def _handle(self, number: int, _) -> None:
        if os.getpid() != self._driver:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        elif number != signal.SIGALRM and next(self._number_of_signal) == 0:
            self._begin()
        elif self._signaled_at is None or not self._can_cut_short:
            return
        elif number == signal.SIGALRM or time.monotonic() - self._signaled_at >= REPEAT_S:
            self._can_cut_short = False
            raise KeyboardInterrupt

    def _begin(self) -> None:
        self._signaled_at = time.monotonic()
        if self._can_cut_short and self._grace_s > 0:
            signal.setitimer(signal.ITIMER_REAL, self._grace_s)
            if self._is_awaited and os.getppid() == self._parent:  # otherwise the parent has exited
                # Do not use print: the interrupted code may be writing to stdout's buffer.
                grace = f"checkpoint.grace_s={self._grace_s:g} s"
                line = f"interrupted: the run saves after the current step if the step ends within {grace}"
                os.write(1, f"{line}. A second signal ends the run at once\n".encode())
                return
        raise KeyboardInterrupt


interrupts = Interrupts()
"""Signal handling in this process. It has no effect until `listen` is called."""
