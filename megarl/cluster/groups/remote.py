"""Remote methods: declared once on a group, with the timeout that bounds them, and run in the group's processes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar, TypeVarTuple, Unpack, cast, overload

import ray

from megarl.cluster.pending import Pending
from megarl.config.schema import TimeoutKind

if TYPE_CHECKING:
    from ray.actor import ActorHandle

    from megarl.cluster.groups.group import WorkerGroup

T = TypeVar("T")
R = TypeVar("R")
Ts = TypeVarTuple("Ts")


@dataclass(frozen=True, slots=True)
class RemoteMethod:
    """A method that runs in another process: its name, the key of cluster.timeouts that bounds the wait, and what the
    driver waits for, in error messages. phase=None: the group's role and the method's name."""

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
    """Declare a method of a WorkerGroup that runs in the group's processes.

    The decorated function has no body: its name, without leading underscores, is that of the method of the process's
    actor or, if the actor has none, of its worker; its signature gives the types. The driver cannot import most worker
    classes, because they import Megatron; `tests/unit/cluster/groups/test_remote.py` compares both signatures.

    Args:
        timeout, phase: as in RemoteMethod.
        join: makes the call's result of the processes' return values, which are in order. By default, their list.
    """
    return lambda function: Declaration(RemoteMethod(function.__name__.lstrip("_"), timeout, phase), join, function)


class Declaration(Generic[T, R, *Ts]):
    """A remote method in the class of a group. Accessed on a group, it is the group's RemoteCall."""

    def __init__(self, method: RemoteMethod, join: Callable[[list[T]], R], function: Callable[[Any, Unpack[Ts]], T]):
        self.method, self.join, self.function = method, join, function

    def __get__(self, group: WorkerGroup, owner: type) -> RemoteCall[T, R, *Ts]:
        return RemoteCall(self.method, self.join, group)


@dataclass(frozen=True, slots=True)
class RemoteCall(Generic[T, R, *Ts]):
    """A remote method of one group. Calling it runs the method in every process of the group."""

    method: RemoteMethod
    join: Callable[[list[T]], R]
    group: WorkerGroup

    def __call__(self, *arguments: *Ts) -> Pending[R]:
        """Run the method with the same arguments in every process."""
        return self.on_each([arguments] * len(self.group.actors))

    def on_each(self, arguments: Iterable[tuple[*Ts]]) -> Pending[R]:
        """Run the method in every process with that process's own arguments."""
        calls = {}
        for (name, actor), own in zip(self.group.actors.items(), arguments, strict=True):
            calls[name] = self._submitter(actor)(self.method.name, *own)
        return self.group.read(self.method, calls).then(self.join)

    def on_first(self, *arguments: *Ts) -> Pending[T]:
        """Run the method in the first process only."""
        name, actor = next(iter(self.group.actors.items()))
        return self.group.read(self.method, {name: self.on(actor, *arguments)}).then(lambda values: values[0])

    def start(self, *arguments: *Ts) -> dict[str, ray.ObjectRef]:
        """Start the method in every process. Return the calls by process name, for the caller to submit."""
        return {name: self.on(actor, *arguments) for name, actor in self.group.actors.items()}

    def on(self, actor: ActorHandle, *arguments: *Ts) -> ray.ObjectRef:
        """Start the method on one actor."""
        return self._submitter(actor)(self.method.name, *arguments)

    def _submitter(self, actor: ActorHandle) -> Callable[..., ray.ObjectRef]:
        return actor.call.options(name=f"{self.group.title}.{self.method.name}").remote


def share(value: T) -> T:
    """Put an argument into Ray's object store once for all processes, each of which receives the value itself."""
    return cast(T, ray.put(value))
