"""All timeouts and intervals of the tests, in seconds.

Tests wait for events. The limits below only end tests that hang, and are too long to be reached on a loaded machine.
"""

from __future__ import annotations

import time
from collections.abc import Callable

POLL_S = 0.01
"""Polling interval for an event."""

ASK_S = 0.2
"""Polling interval that starts a process each time."""

QUIET_S = 3
"""How long to wait for an event that must not happen."""

WAIT_S = 240
"""Limit for operations that are immediate on an idle machine."""

HANG_S = 3600
"""How long a fake of a hanging program sleeps: longer than any test may run, so a test that waits for it fails."""

GRACE_S = 1200
"""A grace period that no test waits for."""

SHORT_S = 1
"""A timeout that is meant to expire. Nothing has to finish within it."""

LIMIT_S = 10
"""A timeout that hanging calls exceed while other calls, which are immediate, do not."""

LIGHT_CPU_S = 3
"""CPU seconds of a command without heavy imports: about one alone, twice as much on a core that is shared with other
processes. Importing torch takes more."""

SCAN_CPU_S = 2
"""CPU seconds to search a text of a megabyte. A linear search takes a fraction of it, a quadratic one minutes."""

RANKS_S = 480
"""Limit for a test's forked ranks."""

START_S = 300
"""Limit for the first steps of a run."""

RUN_S = 540
"""Limit for a short run, or for starting and using an engine. pytest's limit for a test is 600."""

LEARNING_S = 2400
"""Limit for a learning run."""

SOAK_WAIT_S = 900
"""Limit for the steps between two faults of the soak, including all restarts."""

SOAK_TIMEOUT_S = 45
"""Timeouts of the soak's run. A slow machine may exceed them, which only leads to another recovery."""

NODE_DOWN_S = 60
"""SlurmdTimeout of the tests' Slurm: when it marks a silent node as down. Slurm's default is 300."""


def wait_until(condition: Callable[[], object], describe: Callable[[], object] = str, seconds: float = WAIT_S) -> None:
    """Wait until the condition is true. `describe` returns details for the error message."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds} s: {describe()}"
        time.sleep(POLL_S)
