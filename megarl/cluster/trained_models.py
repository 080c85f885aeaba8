"""The models that a run trains, and the placement of their state on devices or in host memory."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from megarl.cluster.groups.trainers import PARTS, TrainerGroup
from megarl.cluster.pending import Pending, join
from megarl.cluster.recovery import Recovery
from megarl.cluster.session import Session
from megarl.config.model_schema import Role
from megarl.config.schema import Config
from megarl.core import device
from megarl.core.checkpoint import Checkpoint
from megarl.core.metrics import Metric

if TYPE_CHECKING:
    from megarl.megatron.offload import Part

UNREAD: tuple[Part, ...] = ("gradients", "optimizer")
"""The parts of a model's state that a refit does not read."""


@dataclass(frozen=True, slots=True)
class TrainedModels:
    """The trainer groups by role, including the actor's. The states that a model's `offload` key lists are in host
    memory during rollouts and while a different model computes on the same devices. During a refit, all of them except
    the actor's weights are in host memory. `run` moves them back before a task. `sharing` maps each role to the roles
    that share its devices and take turns with it. Without `recovery`, the loss of a rank ends the attempt.
    `has_spare_processes`: whether each rank has a spare process that can replace it. `waits_for_copies`: whether
    `await_copies` waits until the copies are complete."""

    groups: Mapping[Role, TrainerGroup]
    sharing: Mapping[Role, Collection[Role]]
    recovery: Recovery | None = None
    has_spare_processes: bool = False
    waits_for_copies: bool = False

    @classmethod
    def of(
        cls,
        session: Session,
        config: Config,
        groups: Mapping[Role, TrainerGroup],
        sharing: Mapping[Role, Collection[Role]],
        checkpoint: Checkpoint | None,
    ) -> TrainedModels:
        """Return the models. Their ranks are replaced if cluster.replace_ranks is set. `checkpoint` is the checkpoint
        that the run resumed from, if any."""
        if not config.cluster.replace_ranks:
            return cls(groups, sharing)
        spares = config.cluster.spare_processes
        recovery = Recovery(session, groups, sharing, checkpoint, config.cluster.copy_every_steps)
        # Sleeping engines wake up for the refit. After that, there may be too little memory to repeat the step.
        waits = config.rollout.sleep and not config.is_offline
        return cls(groups, sharing, recovery, device.on_cuda() if spares is None else spares, waits)

    def attempts(self) -> Iterator[AbstractContextManager[None]]:
        """Yield contexts for attempts at a task until one completes. See Recovery.attempts."""
        return iter([nullcontext()]) if self.recovery is None else self.recovery.attempts()

    def copy_state(self, step: int, repeat: Callable[[], object]) -> None:
        """Make the state after `step` recoverable if ranks are lost. If a copy is due, start copying the models' state
        to shared memory and, if spare nodes have joined, to other nodes. Until the copy is complete, new ranks restore
        the previous one, and `repeat` trains on the samples of `step` again. If shared memory is full, the run
        continues without a copy. Finally, start missing spare processes, so that they import their libraries while the
        engines sample.

        Call this last in the attempt that trains `step`. In an attempt, nothing that may raise LostRanks may follow
        `note_trained`: the new ranks would have the state after `step`, and the next attempt would train it twice."""
        if self.recovery is None or not self.recovery.fits():
            return
        self.recovery.observe_devices()
        if self.recovery.is_due(step):
            self.recovery.finish_copying()
            self._begin_copying(self.recovery, step)
        self.recovery.note_trained(step, repeat)
        for group in self.groups.values() if self.has_spare_processes else ():
            group.refill_spare_processes()

    def _begin_copying(self, recovery: Recovery, step: int) -> None:
        copying: dict[Role, Callable[[], Pending]] = {
            role: partial(group.copy_state, step) for role, group in self.groups.items()
        }
        problem = next(filter(None, self.run(copying, parts=("parameters",)).values()), "")
        kept: list[Role] = []
        for role, group in () if problem else self.groups.items():
            if keepers := recovery.keepers(group):
                group.start_delivery(step, keepers).result()
                kept.append(role)
        recovery.note_copying(step, kept, problem)

    def await_copies(self) -> None:
        """Wait for the copies in progress if `waits_for_copies`. If ranks are lost meanwhile, they are replaced."""
        if self.recovery is not None and self.waits_for_copies:
            for attempt in self.attempts():
                with attempt:
                    self.recovery.finish_copying()

    def poll_copies(self) -> None:
        """If the copies in progress are complete, record them and release the samples kept for repeating steps."""
        if self.recovery is not None:
            self.recovery.finish_copying(waits=False)

    def replace_leaving_node(self) -> None:
        """Replace a node that should leave the run, at the end of a step. See Recovery.replace_leaving_node."""
        if self.recovery is not None:
            self.recovery.replace_leaving_node()

    def take_metrics(self) -> dict[str, Metric]:
        """Return metrics on the replacement of ranks since the last call."""
        return {} if self.recovery is None else self.recovery.take_metrics()

    def run(self, tasks: Mapping[Role, Callable[[], Pending[Any]]], parts: Collection[Part] = PARTS) -> dict[Role, Any]:
        """Run one task for each of these models, and return the results. The tasks are independent of each other. On
        shared devices, a task starts when the previous one has finished: concurrent tasks would take as long and need
        the memory of both. `parts` are the parts of a model's state that its task needs on the devices."""
        running: dict[Role, Pending[Any]] = {}
        for role, task in tasks.items():
            for other in self.sharing[role]:
                if other in running:
                    running[other].result()
            self.offload_others(role)
            group = self.groups[role]
            # A rank runs its calls in order, so the task starts after onload.
            onload = [group.onload(parts)] if group.offloads.intersection(parts) else []
            running[role] = join([*onload, task()]).then(lambda results: results[-1])
        return {role: pending.result() for role, pending in running.items()}

    def offload_others(self, role: Role) -> None:
        """Offload the other models on this model's devices, and free their cached memory."""
        join([self.groups[other].offload(PARTS) for other in self.sharing[role]]).result()

    def stage_actor_for_sync(self) -> None:
        """Load the actor's weights, and offload gradients and optimizers to make room for the engines to wake up for
        the refit."""
        self.offload_others("actor")
        groups = [group for group in self.groups.values() if group.offloads.intersection(UNREAD)]
        offload = join([group.offload(UNREAD) for group in groups])
        actor = self.groups["actor"]
        if "parameters" in actor.offloads:
            actor.onload(("parameters",)).result()
        offload.result()

    def offload_all(self) -> Pending[dict[str, Metric]]:
        """Offload all models. The result is the size of their offloaded parts in GB, as metrics."""
        moving = [group.offload(PARTS) for group in self.groups.values() if group.offloads]
        return join(moving).then(lambda parts: {name: metric for metrics in parts for name, metric in metrics.items()})

    def close(self) -> None:
        """Destroy the process groups of all ranks."""
        join([group.close() for group in self.groups.values()]).result()
