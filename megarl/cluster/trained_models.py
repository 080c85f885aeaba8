"""The models that a run trains, and what is on the devices while one of them computes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from megarl.cluster.groups.trainers import TrainerGroup
from megarl.cluster.pending import Pending, join
from megarl.config.schema import Role
from megarl.core.metrics import Metric

PARTS = ("parameters", "gradients", "optimizer")
"""The parts of a model's state that the keys `offload` may name."""


@dataclass(frozen=True, slots=True)
class TrainedModels:
    """The groups of ranks by role, the actor's among them.

    A part of a model's state that its key `offload` names is in host memory while engines sample, until a task brings
    it back. Where models share devices it is there while another model computes, too.

    share_devices   whether models have devices in common, on which they take turns
    """

    groups: Mapping[Role, TrainerGroup]
    share_devices: bool

    def run(self, tasks: Mapping[Role, Callable[[], Pending[Any]]], parts: Collection[str] = PARTS) -> dict[Role, Any]:
        """Runs a task of each of these models, none of which needs another, and returns their results.

        Where models share devices, a task begins when the one before it has ended: at once they would need the memory
        of both, and take as long. parts: the parts of its state that a task needs.
        """
        if self.share_devices:
            return {role: self._turn(role, task, parts).result() for role, task in tasks.items()}
        under_way = {role: self._begin(role, task, parts) for role, task in tasks.items()}
        return {role: pending.result() for role, pending in under_way.items()}

    def _turn(self, role: Role, task: Callable[[], Pending[Any]], parts: Collection[str]) -> Pending[Any]:
        self._leave(role)
        return self._begin(role, task, parts)

    def _begin(self, role: Role, task: Callable[[], Pending[Any]], parts: Collection[str]) -> Pending[Any]:
        """Submits the task behind the return of its parts: a rank does one call after the other."""
        group = self.groups[role]
        returning = [group.onload(parts)] if group.offloads.intersection(parts) else []
        return join([*returning, task()]).then(lambda results: results[-1])

    def _leave(self, role: Role) -> None:
        """Moves what the other models' keys name to host memory, and frees what they keep for reuse."""
        leaving = [group.offload(PARTS) for other, group in self.groups.items() if other != role]
        for pending in leaving:
            pending.result()

    def present_actor(self) -> None:
        """Has the actor's weights on its devices, to be read, and the gradients given up that keys name: engines that
        share the devices wake to take weights."""
        if self.share_devices:
            self._leave("actor")
        groups = [group for group in self.groups.values() if "gradients" in group.offloads]
        giving = [group.offload(("gradients",)) for group in groups]
        actor = self.groups["actor"]
        returning = [actor.onload(("parameters",))] if "parameters" in actor.offloads else []
        for pending in [*giving, *returning]:
            pending.result()

    def leave_all(self) -> Pending[dict[str, Metric]]:
        """Moves what the keys name to host memory. The result has the bytes that this frees, as metrics."""
        moving = [group.offload(PARTS) for group in self.groups.values() if group.offloads]
        return join(moving).then(lambda found: {name: metric for part in found for name, metric in part.items()})

    def close(self) -> None:
        """Ends the process groups of all ranks."""
        for pending in [group.close() for group in self.groups.values()]:
            pending.result()
