"""The options of `megarl launch`, as data."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from megarl.core.errors import UserError

Container = Literal["none", "pyxis", "enroot", "apptainer"]
CONTAINERS = get_args(Container)

HANDLING_S = 45
"""The seconds of the grace time that are not the run's: the script hands the signal on, and puts the job back into the
queue before the time is over, since Slurm does not do so after that."""


@dataclass(frozen=True, slots=True)
class Request:
    """The options of `megarl launch`.

    nodes      the nodes that the run takes
    spares     further nodes of the allocation, for those that are lost
    fewest     the nodes on which the run goes on with fewer replicas, where too few are left; None takes all of them
    gpus       GPUs of each node for the run; 0 without
    gpu        their kind, by which the planner checks memory and the time of a step
    time       the limit of one allocation, as Slurm has it
    grace      the seconds before the end at which the run is told to save
    restarts   the attempts after the first in one allocation
    stalled    the attempts without a new checkpoint after which the job gives up
    image      the container's, for `container`
    mounts     further folders for the container, as SOURCE:DESTINATION
    command    the command of megarl on the nodes; None takes the one that runs here, in a container `megarl`
    setup      lines for the script, such as `module load cuda`
    options    further options of sbatch
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
    container: Container = "none"
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
        """The time that the run has to end the step under way and to save, once it is told."""
        return self.grace - HANDLING_S


def time_limit_s(time: str) -> int:
    """Return the seconds of a time limit as Slurm writes it: MINUTES, MINUTES:SECONDS, HOURS:MINUTES:SECONDS,
    DAYS-HOURS, DAYS-HOURS:MINUTES or DAYS-HOURS:MINUTES:SECONDS. Raises UserError for another."""
    found = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", time)
    if found is None:
        raise UserError(f"--time={time}: expected minutes, hours:minutes:seconds or days-hours, such as 4:00:00")
    days, *parts = found.groups()
    numbers = [int(part) for part in parts if part is not None]
    if days is None:  # the first number is minutes, unless there are three
        hours, minutes, seconds = numbers if len(numbers) == 3 else (0, *numbers, 0)[:3]
    else:
        hours, minutes, seconds = (*numbers, 0, 0)[:3]
    return ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds
