"""Error types that distinguish user mistakes from failures."""

from __future__ import annotations


class UserError(ValueError):
    """An error that the user can fix in the recipe, the data or on the machine; the message explains how. Every other
    exception, including other ValueErrors, is a failure and is reported with its process, log and stack."""


class RunFailure(RuntimeError):
    """A failure not caused by the user: a lost process, a missed deadline, an error inside a worker. Errors that the
    user caused are raised as UserError, in every process."""


class DamagedCheckpoint(UserError):
    """A checkpoint lacks files, or its files differ from their records. An earlier checkpoint may be intact."""
