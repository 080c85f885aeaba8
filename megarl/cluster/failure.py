"""Why a run ended early, in one line."""

from __future__ import annotations


class RunFailure(RuntimeError):
    """Something that the user did not configure wrongly: a lost process, a missed deadline, an error inside a worker.

    A user's error stays a ValueError, wherever it was found.
    """
