"""Every time of the tests, in seconds.

A test waits for an event. The limits below only end a test that would never end: no load of a machine explains them.
"""

from __future__ import annotations

import time
from collections.abc import Callable

POLL_S = 0.01
"""The interval at which a test looks for an event."""

ASK_S = 0.2
"""The interval at which a test asks a program, which costs a process each time."""

QUIET_S = 3
"""The time in which what must not happen would happen."""

WAIT_S = 240
"""The time for what takes no time on a quiet machine."""

HANG_S = 3600
"""The sleep of a stand-in for a program that hangs: a test that waits for it has failed before."""

GRACE_S = 1200
"""A grace time that a test does not wait for."""

SHORT_S = 1
"""A limit that a test waits for, and nothing else has to meet."""

LIMIT_S = 10
"""A limit that calls which hang are held to, beside others, which take no time."""

RANKS_S = 480
"""The time for the forked ranks of a test."""

START_S = 300
"""The time until the first steps of a run are done."""

RUN_S = 540
"""The time for a short run, or for an engine that is started and asked; pytest's own limit for a test is 600."""

LEARNING_S = 2400
"""The time for a run that learns."""

NODE_DOWN_S = 60
"""The time after which the tests' Slurm gives a silent node up; its default is 300."""


def wait_until(condition: Callable[[], object], describe: Callable[[], object] = str, seconds: float = WAIT_S) -> None:
    """Wait until the condition is true. describe: gives what the error shows where it never is."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds} s: {describe()}"
        time.sleep(POLL_S)
