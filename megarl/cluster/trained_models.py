"""The models that a run trains, and what is on the devices while one of them computes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from megarl.cluster.groups.trainers import TrainerGroup
from megarl.cluster.pending import Pending, join
from megarl.config.model_schema import Role
from megarl.core.metrics import Metric

PARTS = ("parameters", "gradients", "optimizer")
"""The parts of a model's state that the keys `offload` may name."""

UNREAD = ("gradients", "optimizer")
"""The parts of which a refit reads nothing."""


@dataclass(frozen=True, slots=True)
class TrainedModels:
    """The groups of ranks by role, the actor's among them.

    A part of a model's state that its key `offload` names is in host memory while engines sample, until a task brings
    it back. It is there, too, while another model computes that has devices in common with it, and, but for the actor's
    weights, while engines take these.

    sharing   for each role, those that have devices in common with it, on which they take turns
    """

    groups: Mapping[Role, TrainerGroup]
    sharing: Mapping[Role, Collection[Role]]

    def run(self, tasks: Mapping[Role, Callable[[], Pending[Any]]], parts: Collection[str] = PARTS) -> dict[Role, Any]:
        """Runs a task of each of these models, none of which needs another, and returns their results.

        Where models share devices, a task begins when the one before it has ended: at once they would need the memory
        of both, and take as long. parts: the parts of its state that a task needs.
        """
        under_way: dict[Role, Pending[Any]] = {}
        for role, task in tasks.items():
            for other in self.sharing[role]:
                if other in under_way:
                    under_way[other].result()
            self.offload_others(role)
            group = self.groups[role]
            # A rank runs one call after the other: the task waits for its state.
            returning = [group.onload(parts)] if group.offloads.intersection(parts) else []
            under_way[role] = join([*returning, task()]).then(lambda results: results[-1])
        return {role: pending.result() for role, pending in under_way.items()}

    def offload_others(self, role: Role) -> None:
        """Leaves the devices of this model to it: moves what the keys of others there name to host memory, and frees
        what they keep for reuse."""
        leaving = [self.groups[other].offload(PARTS) for other in self.sharing[role]]
        for pending in leaving:
            pending.result()

    def stage_actor_for_sync(self) -> None:
        """Has the actor's weights on its devices, to be read, and the gradients and optimizers away that keys name:
        engines that share the devices wake to take weights."""
        self.offload_others("actor")
        groups = [group for group in self.groups.values() if group.offloads.intersection(UNREAD)]
        leaving = [group.offload(UNREAD) for group in groups]
        actor = self.groups["actor"]
        returning = [actor.onload(("parameters",))] if "parameters" in actor.offloads else []
        for pending in [*leaving, *returning]:
            pending.result()

    def leave_all(self) -> Pending[dict[str, Metric]]:
        """Moves what the keys name to host memory. The result has the bytes that this frees, as metrics."""
        moving = [group.offload(PARTS) for group in self.groups.values() if group.offloads]
        return join(moving).then(lambda found: {name: metric for part in found for name, metric in part.items()})

    def close(self) -> None:
        """Ends the process groups of all ranks."""
        for pending in [group.close() for group in self.groups.values()]:
            pending.result()
