"""Futures for calls to the run's processes. Each has a deadline, and its errors name the process and the phase."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

import ray
from ray.exceptions import RayError

from megarl.cluster.failure import is_cause, is_loss, is_lost_task

if TYPE_CHECKING:
    from megarl.cluster.session import Session

T = TypeVar("T")
U = TypeVar("U")


@dataclass(frozen=True, slots=True)
class Answers:
    """The return values by process name, in call order, and the lost processes whose loss was allowed (`may_fail`)."""

    values: dict[str, Any]
    lost: set[str]


class Pending(Generic[T]):
    """The future result of remote calls, as returned by `Session.submit`. A wait watches every pending call: a failed
    call or a missed deadline ends the wait, whichever Pending it belongs to."""

    def __init__(
        self,
        session: Session | None,
        calls: Mapping[str, ray.ObjectRef],
        phase: str,
        timeout: str,
        timeout_s: float,
        may_fail: Collection[str] = (),
    ):
        """timeout: the key in cluster.timeouts that sets timeout_s."""
        self.phase, self.timeout, self.timeout_s, self.may_fail = phase, timeout, timeout_s, may_fail
        self.deadline = time.monotonic() + timeout_s
        self.unfinished = {ref: name for name, ref in calls.items()}
        self.errors: dict[str, Exception] = {}
        self._answers: dict[str, Any] = {}
        """Return values of finished calls, cached because repeated reads from Ray are no faster than the first."""
        self.session, self._calls = session, tuple(calls)
        self._steps: list[Callable[[Any], Any]] = []
        """Functions that convert the return values into the result, applied in order."""
        self._value: Any = None
        self._has_value = False

    def then(self, function: Callable[[T], U | Pending[U]]) -> Pending[U]:
        """Apply a function to the result when it is ready. If the function returns another Pending, the final
        result is that Pending's result."""
        self._steps.append(function)
        return cast(Pending[U], self)

    def result(self, meanwhile: Callable[[], object] | None = None) -> T:
        """Wait for the calls and return their result. During a long wait, `meanwhile` is called periodically and may
        wait for other calls. Raise UserError if a worker raised one, and for any other error a RunFailure that names
        process and phase."""
        return first([self], meanwhile)._value

    def advance(self) -> bool:
        """Process the results of finished calls. Return whether the result is ready."""
        if not self._has_value:
            if self.unfinished:
                return False
            answers = {name: self._answers[name] for name in self._calls if name not in self.errors}
            self._value, self._has_value = Answers(answers, self.lost), True
            self._answers.clear()
        while self._steps or isinstance(self._value, Pending):
            if isinstance(self._value, Pending):
                if not self._value.advance():
                    return False
                self._value = self._value._value
            else:
                self._value = self._steps.pop(0)(self._value)
        return True

    @property
    def current(self) -> Pending:
        """The Pending whose calls are running: this one, or the Pending that provides its result."""
        return self._value.current if isinstance(self._value, Pending) else self

    @property
    def lost(self) -> set[str]:
        """The lost processes that were allowed to fail."""
        errors = {name: self.errors.get(name) for name in self.may_fail}
        return {name for name, error in errors.items() if is_loss(error) or is_lost_task(error)}

    def take(self, ended: Collection[ray.ObjectRef]) -> None:
        """Record the return values or errors of the calls in `ended` that belong to this Pending."""
        for ref in [ref for ref in self.unfinished if ref in ended]:
            name = self.unfinished.pop(ref)
            value, error = outcome(ref)
            if error is None:
                self._answers[name] = value
            else:
                self.errors[name] = error

    def fatal_errors(self) -> dict[str, Exception]:
        """Return the errors that end the run, by process name. Omit consequences of tolerated losses."""
        lost = self.lost
        if not lost:
            return self.errors
        return {name: error for name, error in self.errors.items() if name not in lost and is_cause(error)}


def ready(value: T) -> Pending[T]:
    """Return a Pending that already has this result."""
    return Pending(None, {}, "", "", 0.0).then(lambda _: value)


def join(pendings: Sequence[Pending[T]]) -> Pending[list[T]]:
    """Combine several Pendings into one whose result is the list of their results, in order."""
    if not pendings:
        return ready([])
    first, *others = pendings
    joint = first.then(lambda value: [value])
    for other in others:
        joint = joint.then(lambda values, other=other: other.then(lambda value: [*values, value]))
    return joint


def first(pendings: Sequence[Pending[T]], meanwhile: Callable[[], object] | None = None) -> Pending[T]:
    """Wait until one of the Pendings is ready, and return the first one in the list that is. See Pending.result."""
    while True:
        for pending in pendings:
            if pending.advance():
                return pending
        current = pendings[0].current
        assert current.session is not None, "a Pending without calls is ready"
        current.session.wait(current, meanwhile)


def outcome(ref: ray.ObjectRef) -> tuple[Any, Exception | None]:
    """Return (value, None) for a finished call that succeeded, and (None, error) for one that failed."""
    try:
        return ray.get(ref, timeout=0), None
    except RayError as error:
        return None, error
