"""All timeouts and intervals of the tests, in seconds.

Tests wait for events. The limits below only end tests that hang, and are too long to be reached on a loaded machine.
"""

from __future__ import annotations

import time
from collections.abc import Callable

POLL_S = 0.01
"""Polling interval for an event."""

ASK_S = 0.2
"""Polling interval for checks that each start a process."""

QUIET_S = 3
"""How long to wait for an event that must not happen."""

WAIT_S = 240
"""Timeout for operations that are immediate on an idle machine."""

HANG_S = 3600
"""How long a program that simulates a hang sleeps: longer than any test may run, so a test that waits for it fails."""

GRACE_S = 1200
"""A grace period that no test waits for."""

SHORT_S = 1
"""A timeout that is meant to expire. Nothing has to finish within it."""

LIMIT_S = 10
"""A timeout that hanging calls exceed while other calls, which are immediate, do not."""

LIGHT_CPU_S = 3
"""CPU seconds allowed for a command without heavy imports. It takes about one alone, and twice as much on a core that
other processes share. Importing torch would take more."""

SCAN_CPU_S = 2
"""CPU seconds allowed for searching a megabyte of text. A linear search takes a fraction of this, and a quadratic one
takes minutes."""

PAGE_CPU_S = 2
"""CPU seconds of a report's main thread until the first charts of a long run are drawn."""

DOCTOR_CPU_S = 10
"""CPU seconds allowed for `megarl doctor`."""

RANKS_S = 480
"""Timeout for the forked ranks of a test."""

START_S = 300
"""Timeout for the first steps of a run."""

RUN_S = 540
"""Timeout for a short run, or for starting and using an engine. pytest's timeout for a test is 600."""

LEARNING_S = 2400
"""Timeout for a learning run."""

GPU_RUN_S = 1500
"""Timeout for a run on GPUs that compiles kernels or loads a published model."""

SOAK_WAIT_S = 900
"""Timeout for the steps between two faults of the soak, including all restarts."""

SOAK_HEAL_S = 10
"""Duration of the soak's temporary faults."""

SOAK_TIMEOUT_S = 45
"""Value of cluster.timeouts in the soak's run. On a slow machine, exceeding it only leads to another recovery."""

NODE_DOWN_S = 60
"""SlurmdTimeout in tests: seconds after which Slurm marks an unresponsive node as down. Slurm's default is 300."""


def wait_until(condition: Callable[[], object], describe: Callable[[], object] = str, seconds: float = WAIT_S) -> None:
    """Wait until the condition is true. `describe` returns details for the error message."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds} s: {describe()}"
        time.sleep(POLL_S)
