"""The results of a user's functions."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Result:
    """What a function of the user said of one call. "Wrong" is a value, "failed" is none.

    value      the number or the numbers that it returned; None if it returned something else, or failed
    returned   what it returned, in a word for messages
    failure    why it returned nothing, such as "raised KeyError: 'a'"; None if it returned
    """

    value: float | list[float] | None
    returned: str = ""
    failure: str | None = None
