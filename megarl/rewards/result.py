"""Results of user-defined functions."""

from __future__ import annotations

from dataclasses import dataclass

from megarl.usercode.failures import Kind


@dataclass(frozen=True, slots=True)
class Result:
    """The result of one call to a user function. A wrong response has a value; a failed call has none.

    Attributes:
        value: the returned number or numbers, or None if the function returned something else or failed.
        returned: a short description of the returned object, for messages.
        kind: kind of failure, if the call failed.
        stack: stack of the exception in the user's code, if it raised one.
    """

    value: float | list[float] | None
    returned: str = ""
    failure: str | None = None
    kind: Kind = "error"
    stack: str = ""

    @property
    def is_infrastructure(self) -> bool:
        """Whether the infrastructure, rather than the function, caused the failure."""
        return self.failure is not None and self.kind != "error"
