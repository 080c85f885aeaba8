"""Why a run ended early, in one line."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from ray.exceptions import RayActorError, RayTaskError


class RunFailure(RuntimeError):
    """Something that the user did not configure wrongly: a lost process, a missed deadline, an error inside a worker.

    A user's error stays a ValueError, wherever it was found.
    """


def cause(errors: Mapping[str, Exception], phase: str, logs: Path) -> ValueError | RunFailure:
    """The most telling of several errors, by process: a user's, then a lost process, then what its peers saw of it."""
    name, error = min(errors.items(), key=lambda item: _rank(item[1]))
    origin = _origin(error)
    if isinstance(origin, ValueError):
        return ValueError(str(origin))
    log = logs / f"{name}.log"
    if isinstance(error, RayActorError):
        return RunFailure(f"{phase}: {name} died; see {log}")
    first_line = str(origin).strip().partition("\n")[0]
    return RunFailure(f"{phase}: {name}: {type(origin).__name__}: {first_line}; see {log}")


def is_cause(error: Exception) -> bool:
    """Whether it is more than what a process sees of the failure of another: a user's error, or a loss."""
    return _rank(error) < 2


def _rank(error: Exception) -> int:
    if isinstance(_origin(error), ValueError):
        return 0
    return 1 if isinstance(error, RayActorError) else 2


def _origin(error: Exception) -> BaseException:
    return error.cause if isinstance(error, RayTaskError) else error
