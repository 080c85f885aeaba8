"""The reason why a run ended early, in one line."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from ray.exceptions import OutOfMemoryError, RayActorError, RayTaskError

from megarl.core.errors import UserError

_COLOUR = re.compile(r"\x1b\[[0-9;]*m")


class RunFailure(RuntimeError):
    """A failure that is not an error of the user: a lost process, a missed deadline, an error inside a worker.

    A user's error stays a UserError, wherever it was found.
    """


def cause(errors: Mapping[str, Exception], phase: str, logs: Path) -> UserError | RunFailure:
    """Returns the most telling of several errors, by process: a user's error, then a lost process, then its peers'
    errors."""
    name, error = min(errors.items(), key=lambda item: rank(item[1]))
    origin = _origin(error)
    if isinstance(origin, UserError):
        return UserError(str(origin))
    return RunFailure(f"{phase}: {name}{_what_happened(error)}; see {logs / name}.log")


def write_stacks(errors: Mapping[str, Exception], logs: Path) -> None:
    """Appends the stacks of errors inside workers, by process, to their logs: Ray gives them to the driver alone."""
    for name, error in errors.items():
        log = logs / f"{name}.log"
        if isinstance(error, RayTaskError) and log.exists():
            with log.open("a", encoding="utf-8", errors="backslashreplace") as file:
                file.write(_COLOUR.sub("", str(error)).rstrip() + "\n")


def is_loss(error: Exception | None) -> bool:
    """Returns whether the process is gone: it died, or Ray ended it before the machine ran out of memory."""
    return isinstance(error, RayActorError | OutOfMemoryError)


def is_cause(error: Exception) -> bool:
    """Returns whether the error is a cause, a user's error or a loss, rather than a consequence in another process."""
    return rank(error) < 2


def rank(error: Exception) -> int:
    """Returns the rank of an error among others, the most telling first: 0 for a user's error, 1 for a loss, 2 for the
    errors that follow from a failure elsewhere."""
    if isinstance(_origin(error), UserError):
        return 0
    return 1 if is_loss(error) else 2


def _what_happened(error: Exception) -> str:
    origin = _origin(error)
    lines = str(origin).strip().splitlines() or [""]
    if isinstance(error, OutOfMemoryError):
        return f" was ended by Ray before the machine ran out of memory: {lines[0]}"
    if isinstance(error, RayActorError):
        # The traceback of an error in its constructor is in no other log.
        return f" did not start: {lines[-1]}" if error.actor_init_failed else " died"
    return f": {type(origin).__name__}: {lines[0]}"


def _origin(error: Exception) -> BaseException:
    return error.cause if isinstance(error, RayTaskError) else error
