"""Why a run ended early, in one line."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from ray.exceptions import OutOfMemoryError, RayActorError, RayTaskError


class RunFailure(RuntimeError):
    """Something that the user did not configure wrongly: a lost process, a missed deadline, an error inside a worker.

    A user's error stays a ValueError, wherever it was found.
    """


def cause(errors: Mapping[str, Exception], phase: str, logs: Path) -> ValueError | RunFailure:
    """The most telling of several errors, by process: a user's, then a lost process, then what its peers saw of it."""
    name, error = min(errors.items(), key=lambda item: rank(item[1]))
    origin = _origin(error)
    if isinstance(origin, ValueError):
        return ValueError(str(origin))
    return RunFailure(f"{phase}: {name}{_what_happened(error)}; see {logs / name}.log")


def is_loss(error: Exception | None) -> bool:
    """Whether the process is gone: it died, or Ray ended it before the machine ran out of memory."""
    return isinstance(error, RayActorError | OutOfMemoryError)


def is_cause(error: Exception) -> bool:
    """Whether it is more than what a process sees of the failure of another: a user's error, or a loss."""
    return rank(error) < 2


def rank(error: Exception) -> int:
    """Orders errors by what they tell: a user's is 0, a loss 1, what others see of a failure 2."""
    if isinstance(_origin(error), ValueError):
        return 0
    return 1 if is_loss(error) else 2


def _what_happened(error: Exception) -> str:
    origin = _origin(error)
    lines = str(origin).strip().splitlines() or [""]
    if isinstance(error, OutOfMemoryError):
        return f" was ended by Ray before the machine ran out of memory: {lines[0]}"
    if isinstance(error, RayActorError):
        # The traceback of what its constructor raised is in no other log.
        return f" did not start: {lines[-1]}" if error.actor_init_failed else " died"
    return f": {type(origin).__name__}: {lines[0]}"


def _origin(error: Exception) -> BaseException:
    return error.cause if isinstance(error, RayTaskError) else error
