"""Remote methods. A method is declared once on a group, with its timeout, and runs in the group's processes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar, TypeVarTuple, Unpack, cast, overload

import ray
from ray.actor import ActorHandle

from megarl.cluster.pending import Pending
from megarl.config.cluster_schema import TimeoutKind

if TYPE_CHECKING:
    from megarl.cluster.groups.group import WorkerGroup

T = TypeVar("T")
R = TypeVar("R")
Ts = TypeVarTuple("Ts")


@dataclass(frozen=True, slots=True)
class RemoteMethod:
    """A method that runs in a different process.

    Attributes:
        timeout: the key in cluster.timeouts that bounds the wait.
        phase: what the driver waits for, as shown in error messages; None uses the group's role and the method's name.
    """

    name: str
    timeout: TimeoutKind
    phase: str | None = None


@overload
def remote(
    timeout: TimeoutKind, phase: str | None = None
) -> Callable[[Callable[[Any, Unpack[Ts]], T]], Declaration[T, list[T], *Ts]]: ...
@overload
def remote(
    timeout: TimeoutKind, phase: str | None = None, *, join: Callable[[list[T]], R]
) -> Callable[[Callable[[Any, Unpack[Ts]], T]], Declaration[T, R, *Ts]]: ...
def remote(timeout: TimeoutKind, phase: str | None = None, *, join: Callable[[list], Any] = list) -> Any:
    """Declare a WorkerGroup method that runs in the group's processes.

    The decorated function has no body. Its name, without leading underscores, names a method of the process's actor or,
    if the actor has no such method, of the actor's worker. Its signature gives the types. The driver cannot import most
    worker classes, because they import Megatron; `tests/unit/cluster/groups/test_remote.py` compares both signatures.

    Args:
        timeout, phase: as in RemoteMethod.
        join: combines the return values from the processes, in process order, into the call's result. By default, the
            result is their list.
    """
    return lambda function: Declaration(RemoteMethod(function.__name__.lstrip("_"), timeout, phase), join, function)


class Declaration(Generic[T, R, *Ts]):
    """A remote method declared in a group's class. On a group instance, the attribute is a RemoteCall."""

    def __init__(self, method: RemoteMethod, join: Callable[[list[T]], R], function: Callable[[Any, Unpack[Ts]], T]):
        self.method, self.join, self.function = method, join, function

    def __get__(self, group: WorkerGroup, owner: type) -> RemoteCall[T, R, *Ts]:
        return RemoteCall(self.method, self.join, group)


@dataclass(frozen=True, slots=True)
class RemoteCall(Generic[T, R, *Ts]):
    """A remote method bound to one group. Calling it runs the method in every process in the group."""

    method: RemoteMethod
    join: Callable[[list[T]], R]
    group: WorkerGroup

    def __call__(self, *arguments: *Ts) -> Pending[R]:
        """Run the method with the same arguments in every process."""
        return self.on_each([arguments] * len(self.group.actors))

    def on_each(self, arguments: Iterable[tuple[*Ts]]) -> Pending[R]:
        """Run the method in every process with that process's own arguments."""
        calls = {}
        for (name, actor), values in zip(self.group.actors.items(), arguments, strict=True):
            calls[name] = self._submitter(actor)(self.method.name, *values)
        return self.group.read(self.method, calls).then(self.join)

    def on_first(self, *arguments: *Ts) -> Pending[T]:
        """Run the method in the first process only."""
        name, actor = next(iter(self.group.actors.items()))
        return self.group.read(self.method, {name: self.on(actor, *arguments)}).then(lambda values: values[0])

    def start(self, *arguments: *Ts) -> dict[str, ray.ObjectRef]:
        """Start the method in every process. Return the calls by process name; the caller must submit them."""
        return {name: self.on(actor, *arguments) for name, actor in self.group.actors.items()}

    def on(self, actor: ActorHandle, *arguments: *Ts) -> ray.ObjectRef:
        """Start the method on one actor."""
        return self._submitter(actor)(self.method.name, *arguments)

    def _submitter(self, actor: ActorHandle) -> Callable[..., ray.ObjectRef]:
        return actor.call.options(name=f"{self.group.title}.{self.method.name}").remote


def share(value: T) -> T:
    """Put an argument into Ray's object store once. Each process then receives the value instead of a reference."""
    return cast(T, ray.put(value))
