"""Results of user-defined functions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from megarl.usercode.failures import Kind

Issues = Mapping[str, str | None]
"""Problem name -> description, or None if the response did not cause the problem. A response with problems is still
scored. The metric reward/FUNCTION_PROBLEM_frac is the fraction of samples with the problem."""

TRUNCATED = "truncated"
"""Issue: the input is too long for the model, so the model reads only part of it."""

VERBATIM = "verbatim"
"""Issue: the chat template changes or rejects the response, so the response is inserted without the template."""

UNRATED = "unrated"
"""Issue: the judge did not rate the response, so the response gets the worst rating."""

WORST_RATING = 0.0


class Rating(float):
    """A judge's rating of a response, from 0 to 1."""

    issues: Issues

    def __new__(cls, value: float, issues: Issues) -> Rating:
        rating = super().__new__(cls, value)
        rating.issues = issues
        return rating


@dataclass(frozen=True, slots=True)
class Result:
    """The result of one call to a user function. A wrong response has a value; a failed call has none.

    Attributes:
        value: the returned number or numbers, or None if the function returned something else or failed.
        returned: a short description of the returned object, for messages.
        kind: kind of failure, if the call failed.
        stack: stack trace of the exception in the user's code, if it raised one.
        issues: problems that the response caused.
        feedback: text for teachers; see `Teacher.feedback`.
    """

    value: float | list[float] | None
    returned: str = ""
    failure: str | None = None
    kind: Kind = "error"
    stack: str = field(default="", compare=False)
    issues: Issues = field(default_factory=dict)
    feedback: str = ""

    @property
    def is_infrastructure(self) -> bool:
        """Whether the infrastructure, rather than the function, caused the failure."""
        return self.failure is not None and self.kind != "error"
