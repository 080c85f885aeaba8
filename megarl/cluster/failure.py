"""Failures of a run, and the most informative of several errors."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from ray.exceptions import OutOfMemoryError, RayActorError, RayTaskError

from megarl.core.errors import UserError

_COLOUR = re.compile(r"\x1b\[[0-9;]*m")


class RunFailure(RuntimeError):
    """A failure not caused by the user: a lost process, a missed deadline, an error inside a worker.

    Every process raises UserError for a user's error.
    """


def cause(errors: Mapping[str, Exception], phase: str, logs: Path) -> UserError | RunFailure:
    """Return the most informative of several errors, given by process: a user's error first, then a lost process, then
    errors of its peers."""
    name, error = min(errors.items(), key=lambda item: rank(item[1]))
    origin = _origin(error)
    if isinstance(origin, UserError):
        return UserError(str(origin))
    return RunFailure(f"{phase}: {name}{_what_happened(error)}; see {logs / name}.log")


def write_stacks(errors: Mapping[str, Exception], logs: Path) -> None:
    """Append the stacks of workers' errors to the workers' logs: Ray passes them to the driver only."""
    for name, error in errors.items():
        log = logs / f"{name}.log"
        if isinstance(error, RayTaskError) and log.exists():
            with log.open("a", encoding="utf-8", errors="backslashreplace") as file:
                file.write(_COLOUR.sub("", str(error)).rstrip() + "\n")


def is_loss(error: Exception | None) -> bool:
    """Return whether the process is lost: it died, or Ray killed it before the machine ran out of memory."""
    return isinstance(error, RayActorError | OutOfMemoryError)


def is_cause(error: Exception) -> bool:
    """Return whether the error is a user's error or a lost process, rather than a consequence of one."""
    return rank(error) < 2


def rank(error: Exception) -> int:
    """Return the rank of an error, the most informative first: 0 for a user's error, 1 for a loss, 2 for errors that
    follow from a failure elsewhere."""
    if isinstance(_origin(error), UserError):
        return 0
    return 1 if is_loss(error) else 2


def _what_happened(error: Exception) -> str:
    origin = _origin(error)
    lines = str(origin).strip().splitlines() or [""]
    if isinstance(error, OutOfMemoryError):
        return f" was killed by Ray before the machine ran out of memory: {lines[0]}"
    if isinstance(error, RayActorError):
        # No log has the traceback of an error in the constructor.
        return f" did not start: {lines[-1]}" if error.actor_init_failed else " died"
    return f": {type(origin).__name__}: {lines[0]}"


def _origin(error: Exception) -> BaseException:
    return error.cause if isinstance(error, RayTaskError) else error
