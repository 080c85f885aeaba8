"""Waits for external resources with exponential backoff, up to a total time limit."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 30.0


def pauses(limit_s: float) -> Iterator[float]:
    """Yield pauses between attempts that add up to `limit_s`."""
    pause = FIRST_PAUSE_S
    while limit_s > 0:
        pause = min(pause, LONGEST_PAUSE_S, limit_s)
        yield pause
        limit_s -= pause
        pause *= 2


class Outage:
    """Limits how long calls wait for an unavailable service. Calls share the limit, so a thousand calls do not wait a
    thousand times as long."""

    def __init__(self, limit_s: float, clock: Callable[[], float] = time.monotonic):
        self.limit_s, self._clock = limit_s, clock
        self._since: float | None = None
        """Time of the first failed call since the last successful one."""

    def begin_call(self) -> Iterator[float | None]:
        """Return an iterator over one call's pauses. It yields None once the limit is reached."""
        began, pause = self._clock(), FIRST_PAUSE_S
        while True:
            now = self._clock()
            self._since = now if self._since is None else self._since
            left_s = min(began, self._since) + self.limit_s - now
            yield min(pause, LONGEST_PAUSE_S, left_s) if left_s > 0 else None
            pause *= 2

    def end(self) -> None:
        """Record a successful call."""
        self._since = None
