"""The options of `megarl launch`, as data."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megarl.core.errors import UserError

CONTAINERS = ("none", "pyxis", "enroot", "apptainer")

HANDLING_S = 45
"""Seconds of the grace period that are reserved for the job script, which forwards the signal and requeues the job.
Slurm does not allow requeuing after the time limit."""


@dataclass(frozen=True, slots=True)
class Request:
    """The options of `megarl launch`. Its help explains them.

    Attributes:
        fewest: minimum number of nodes after nodes are lost. The run then has fewer replicas. None: always all nodes.
        gpu: GPU type for the planner's estimates of memory and step time.
        container: container runtime, one of CONTAINERS.
        command: megarl command on the nodes. None: the command of this Python installation, or `megarl` in a container.
        template: script template. None: megarl's template.
    """

    nodes: int
    time: str
    spares: int = 0
    fewest: int | None = None
    gpus: int = 8
    gpu: str = "H100-80GB"
    partition: str | None = None
    account: str | None = None
    grace: int = 120
    restarts: int = 3
    stalled: int = 3
    container: str = "none"
    image: str | None = None
    mounts: Sequence[str] = ()
    command: str | None = None
    setup: Sequence[str] = ()
    options: Sequence[str] = ()
    template: Path | None = None

    @property
    def seconds(self) -> int:
        return time_limit_s(self.time)

    @property
    def saving_seconds(self) -> int:
        """Seconds that the run has after the signal to finish its current step and save."""
        return self.grace - HANDLING_S


def time_limit_s(time: str) -> int:
    """Convert a time limit in Slurm's format to seconds. The format is one of MINUTES, MINUTES:SECONDS,
    HOURS:MINUTES:SECONDS, DAYS-HOURS, DAYS-HOURS:MINUTES or DAYS-HOURS:MINUTES:SECONDS. Raise UserError for any other
    format."""
    match = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", time)
    if match is None:
        raise UserError(
            f"--time={time}: expected minutes, hours:minutes:seconds or days-hours. Fix: use one of these forms, "
            "such as 4:00:00"
        )
    days, *parts = match.groups()
    numbers = [int(part) for part in parts if part is not None]
    if days is None:  # the first of one or two numbers is minutes, the first of three is hours
        hours, minutes, seconds = numbers if len(numbers) == 3 else (0, *numbers, 0)[:3]
    else:
        hours, minutes, seconds = (*numbers, 0, 0)[:3]
    return ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds
