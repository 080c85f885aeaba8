"""The errors that tell who has to act."""

from __future__ import annotations


class UserError(ValueError):
    """An error that its reader mends in the recipe, the data or the machine; its text says how. Any other error, also
    another ValueError, is a failure, and is shown with its process, log and stack."""
