"""Select the most informative error when several processes fail."""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from ray.exceptions import (
    NodeDiedError,
    OutOfMemoryError,
    RayActorError,
    RayTaskError,
    TaskUnschedulableError,
    WorkerCrashedError,
)

from megarl.core.errors import InfrastructureFailure, RunFailure, UserError
from megarl.core.files import DISK_FULL

_COLOR = re.compile(r"\x1b\[[0-9;]*m")


class LostRanks(RunFailure):
    """A failure caused only by the loss of replaceable ranks."""


def cause(errors: Mapping[str, Exception], phase: str, logs: Path) -> UserError | RunFailure:
    """Return the most informative error, as a UserError or RunFailure. `errors` are keyed by process name. User errors
    rank first, then infrastructure failures, then lost processes, then all other errors."""
    name, error = min(errors.items(), key=lambda item: rank(item[1]))
    origin = _origin(error)
    if isinstance(origin, UserError | InfrastructureFailure):
        return type(origin)(str(origin))
    if isinstance(origin, OSError) and origin.errno in DISK_FULL:
        return InfrastructureFailure(f"{phase}: {name}: {origin}. Fix: free disk space, then resume with resume=auto")
    return RunFailure(f"{phase}: {name}{_describe_error(error)}. See {logs / name}.log")


def write_stacks(errors: Mapping[str, Exception], logs: Path) -> None:
    """Append the stack trace of each worker's error to that worker's log, because Ray sends it only to the driver."""
    for name, error in errors.items():
        log = logs / f"{name}.log"
        if isinstance(error, RayTaskError) and log.exists():
            # The disk may be full, and the error that is about to be raised matters more than its stack trace.
            with suppress(OSError), log.open("a", encoding="utf-8", errors="backslashreplace") as file:
                file.write(_COLOR.sub("", str(error)).rstrip() + "\n")


def is_loss(error: Exception | None) -> bool:
    """Return whether the error reports a lost process: one that died, or that Ray killed because memory ran low."""
    return isinstance(error, RayActorError | OutOfMemoryError)


def is_lost_task(error: Exception | None) -> bool:
    """Return whether the error reports that a task (not an actor) was lost with its node or worker process."""
    return isinstance(error, NodeDiedError | TaskUnschedulableError | WorkerCrashedError)


def is_cause(error: Exception) -> bool:
    """Return whether the error is a cause, such as a lost process, rather than a consequence of one."""
    return rank(error) < 3


def rank(error: Exception) -> int:
    """Return the error's rank: 0 for a user error, 1 for an infrastructure failure, 2 for a lost process, 3 for a
    consequence of another failure."""
    origin = _origin(error)
    if isinstance(origin, UserError):
        return 0
    if isinstance(origin, InfrastructureFailure) or (isinstance(origin, OSError) and origin.errno in DISK_FULL):
        return 1
    return 2 if is_loss(error) else 3


def _describe_error(error: Exception) -> str:
    origin = _origin(error)
    lines = str(origin).strip().splitlines() or [""]
    if isinstance(error, OutOfMemoryError):
        return f" was killed by Ray before the machine ran out of memory: {lines[0]}"
    if isinstance(error, RayActorError):
        # Quote a constructor error, because no log contains its traceback.
        return f" did not start: {lines[-1]}" if error.actor_init_failed else " died"
    return f": {type(origin).__name__}: {lines[0]}"


def _origin(error: Exception) -> BaseException:
    return error.cause if isinstance(error, RayTaskError) else error
