"""Futures: calls under way on processes of the run, each with one deadline and one diagnosis."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import ray
from ray.exceptions import RayError

from megarl.cluster.failure import is_cause, is_loss

if TYPE_CHECKING:
    from megarl.cluster.session import Session

T = TypeVar("T")
U = TypeVar("U")


@dataclass(frozen=True, slots=True)
class Answers:
    """The values that processes answered, by name in the order of the calls, and the may_fail processes that died."""

    values: dict[str, Any]
    lost: set[str]


class Pending(Generic[T]):
    """The result of calls that processes are working on; `Session.submit` makes it.

    A wait looks after every call that is under way: a failed call or a missed deadline ends it, whichever Pending it
    belongs to.
    """

    def __init__(
        self,
        session: Session | None,
        calls: Mapping[str, ray.ObjectRef],
        phase: str,
        limit: str,
        timeout_s: float,
        may_fail: Collection[str] = (),
    ):
        """limit: the key of cluster.timeouts that gives timeout_s."""
        self.phase, self.limit, self.timeout_s, self.may_fail = phase, limit, timeout_s, may_fail
        self.deadline = time.monotonic() + timeout_s
        self.unfinished = {ref: name for name, ref in calls.items()}
        self.errors: dict[str, Exception] = {}
        self._answers: dict[str, Any] = {}
        """The values of calls that have ended: to read one again takes as long as the first time."""
        self._session, self._calls = session, tuple(calls)
        self._steps: list[Callable[[Any], Any]] = []
        """Functions that make the result of the answers, applied one after the other."""
        self._value: Any = None
        self._has_value = False

    def then(self, function: Callable[[T], U | Pending[U]]) -> Pending[U]:
        """Returns this Pending, whose result is function(result) from now on. If that is a Pending, its result is
        taken."""
        self._steps.append(function)
        return self

    def result(self, meanwhile: Callable[[], object] | None = None) -> T:
        """Waits for the calls, and returns their result.


        meanwhile: called now and then during a long wait; it may wait for other calls.
        Raises UserError for one that a worker raised, and RunFailure, with process and phase, for anything else.
        """
        if not self.advance():
            self.current._session.wait(self, meanwhile)
        return self._value

    def advance(self) -> bool:
        """Goes on with the results of calls that have ended. Returns whether `result` returns at once."""
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
        """The Pending whose calls are under way: this one, or the one that its result comes from."""
        return self._value.current if isinstance(self._value, Pending) else self

    @property
    def lost(self) -> set[str]:
        """The may_fail processes that died."""
        return {name for name in self.may_fail if is_loss(self.errors.get(name))}

    def take(self, ended: Collection[ray.ObjectRef]) -> None:
        """Notes which of its calls have ended, with their values or errors."""
        for ref in [ref for ref in self.unfinished if ref in ended]:
            name = self.unfinished.pop(ref)
            value, error = outcome(ref)
            if error is None:
                self._answers[name] = value
            else:
                self.errors[name] = error

    def fatal_errors(self) -> dict[str, Exception]:
        """Returns the errors, by process, that end the run: those that do not follow from the loss of an may_fail
        one."""
        lost = self.lost
        if not lost:
            return self.errors
        return {name: error for name, error in self.errors.items() if name not in lost and is_cause(error)}


def ready(value: T) -> Pending[T]:
    """Returns a Pending that waits for nothing."""
    return Pending(None, {}, "", "", 0.0).then(lambda _: value)


def join(pendings: Sequence[Pending[T]]) -> Pending[list[T]]:
    """Returns one Pending for several that are under way, with all of their results in order."""
    if not pendings:
        return ready([])
    first, *others = pendings
    joint = first.then(lambda value: [value])
    for other in others:
        joint = joint.then(lambda values, other=other: other.then(lambda value: [*values, value]))
    return joint


def first(pendings: Sequence[Pending[T]], meanwhile: Callable[[], object] | None = None) -> Pending[T]:
    """Waits until one of these has its result, and returns the first in the list that has. See Pending.result."""
    for pending in pendings:
        if pending.advance():
            return pending
    return pendings[0].current._session.first(pendings, meanwhile)


def outcome(ref: ray.ObjectRef) -> tuple[Any, Exception | None]:
    """Returns the value of a call that has ended, and None; or None, and its error."""
    try:
        return ray.get(ref, timeout=0), None
    except RayError as error:
        return None, error
