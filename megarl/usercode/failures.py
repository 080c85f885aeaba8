"""Failures of the infrastructure that user code depends on, as opposed to errors of the user code itself."""

from __future__ import annotations

from typing import Literal

from megarl.core.errors import causes

RESTARTS = 2
"""Number of times that a call is repeated in a fresh process after its process was killed or crashed."""

Kind = Literal["error", "lost", "away"]
"""Kind of a failed call: an exception or another fault of the code (`error`), a process that was killed (`lost`), or a
service that cannot be reached (`away`)."""


class ProcessLost(RuntimeError):
    """A process that user code depends on, such as a sandbox, exited through no fault of the user code."""


class ServiceUnavailable(ConnectionError):
    """A server cannot be reached, does not respond, or reports that it is unavailable."""


def kind_of(error: BaseException) -> Kind:
    """Return the kind of failure that an exception in user code reports. If a connection is refused or lost, libraries
    raise their own exceptions, which are caused by a ConnectionError."""
    for cause in causes(error):
        if isinstance(cause, ProcessLost):
            return "lost"
        if isinstance(cause, ConnectionError):
            return "away"
    return "error"
