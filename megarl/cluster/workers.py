"""The workers of a run, started and connected."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megarl.cluster.groups.engines import EngineGroup
from megarl.cluster.groups.reward_engines import RewardEngineGroup
from megarl.cluster.groups.reward_model import RewardModelGroup
from megarl.cluster.groups.rewards import RewardGroup
from megarl.cluster.groups.trainers import TrainerGroup
from megarl.cluster.model_folders import ModelFolders
from megarl.cluster.pending import Pending
from megarl.cluster.placement import Placement, Process
from megarl.cluster.refit import Refit
from megarl.cluster.session import Session
from megarl.config.schema import Config, Role
from megarl.core import device
from megarl.core.checkpoint import Checkpoint
from megarl.core.metrics import Metric
from megarl.core.timing import ElapsedTime
from megarl.resharding.families import huggingface_holder
from megarl.resharding.planning.plan import Plan
from megarl.resharding.planning.planner import make_plan

PARTS = ("parameters", "gradients", "optimizer")
"""The parts of a trainer's state that the keys `offload` may name."""


@dataclass(frozen=True, slots=True)
class Workers:
    """The groups of a run, by role, and the refit between them.

    share_devices   whether a role's devices are also those of others, which then take turns
    """

    actor: TrainerGroup
    critic: TrainerGroup | None
    implicit_reward: TrainerGroup | None
    reward_model: RewardModelGroup | RewardEngineGroup | None
    engines: EngineGroup
    rewards: RewardGroup
    refit: Refit
    export_plan: Plan
    share_devices: bool

    def export(self, out: Path) -> None:
        self.actor.export(self.export_plan, out)

    @property
    def trained(self) -> list[TrainerGroup]:
        """The groups whose weights the run changes."""
        return [group for group in (self.actor, self.critic, self.implicit_reward) if group is not None]

    def side_by_side(self, tasks: Mapping[str, Callable[[], Pending[Any]]]) -> dict[str, Any]:
        """Submits tasks of roles that do not need each other, and returns their results by the names of the tasks.

        Where roles share devices, a task begins when the one before it has ended: at once they would need the memory
        of both, and take as long.
        """
        if self.share_devices:
            return {name: task().result() for name, task in tasks.items()}
        under_way = {name: task() for name, task in tasks.items()}
        return {name: pending.result() for name, pending in under_way.items()}

    def give_up_gradients(self) -> None:
        """Frees the place of the trainers' gradients, where their keys `offload` name them, until the end of the next
        rollout: engines that share their GPUs wake to take weights."""
        groups = [group for group in self.trained if "gradients" in group.offloads]
        for pending in [group.offload(("gradients",)) for group in groups]:
            pending.result()

    @contextmanager
    def offloaded(self) -> Iterator[dict[str, Metric]]:
        """Offloads what the trainers' keys `offload` name while it is inside, and makes the engines sleep at the end.
        Yields the bytes that are free for it, as metrics."""
        groups = [group for group in self.trained if group.offloads]
        moving = [group.offload(PARTS) for group in groups]
        yield {name: metric for pending in moving for name, metric in pending.result().items()}
        self.engines.sleep().result()
        for pending in [group.onload(PARTS) for group in groups]:
            pending.result()

    def close(self) -> None:
        """Ends the process groups of all ranks. Engines are in none, and end with their processes."""
        groups = [*self.trained, *([self.reward_model] if isinstance(self.reward_model, RewardModelGroup) else [])]
        for pending in [group.close() for group in groups]:
            pending.result()


def launch_workers(
    session: Session,
    config: Config,
    models: ModelFolders,
    placement: Placement,
    checkpoint: Checkpoint | None,
    engines: EngineGroup | None = None,
) -> Workers:
    """Starts all processes side by side, then plans how weights flow between them. Each model starts from its folder,
    and then loads its part of the checkpoint, if there is one. engines: running engines of the same config (None: they
    are started)."""

    def if_placed(role: Role, folder: Path | None, processes: Sequence[Process]) -> TrainerGroup | None:
        return TrainerGroup(session, config, role, folder, processes) if processes else None

    actor = TrainerGroup(session, config, "actor", models.actor, placement.trainers)
    critic = if_placed("critic", models.critic, placement.critics)
    implicit_reward = if_placed("implicit_reward", models.implicit_reward, placement.implicit_rewards)
    elapsed = ElapsedTime()
    starting: dict[str, Pending[Any]] = {}
    if engines is None:
        engines = EngineGroup(session, config, models.actor, placement.engines)
        starting["engines"] = engines.start()
        if config.is_colocated and device.on_cuda():
            _await_starts(session, starting, elapsed)  # asleep, they leave the shared devices' memory to the others
    reward_model = _reward_model(session, config, models.reward_model, placement.reward_models)
    rewards = RewardGroup(session, config, placement.rewards, reward_model, models)
    for name, group in (("reward model", reward_model), ("rewards", rewards)):
        if group is not None:
            starting[name] = group.start()
    for name, group in (("actor", actor), ("critic", critic), ("implicit reward model", implicit_reward)):
        if group is not None:
            starting[name] = _start_trained(group, checkpoint)
    _await_starts(session, starting, elapsed)
    export_plan = make_plan(actor.holders, [huggingface_holder(models.hf_config, config.model.dtype)])
    return Workers(
        actor=actor,
        critic=critic,
        implicit_reward=implicit_reward,
        reward_model=reward_model,
        engines=engines,
        rewards=rewards,
        refit=Refit(session, config, actor, engines, export_plan),
        export_plan=export_plan,
        share_devices=config.is_colocated,
    )


def _await_starts(session: Session, starting: dict[str, Pending[Any]], elapsed: ElapsedTime) -> None:
    """Waits until all have started, takes them out, and prints a line for each as soon as it has."""
    while starting:
        started = session.first(list(starting.values()))
        started.result()
        name = next(name for name, pending in starting.items() if pending is started)
        del starting[name]
        elapsed.print(f"{name}: started")


def _start_trained(group: TrainerGroup, checkpoint: Checkpoint | None) -> Pending[Any]:
    started = group.start()
    return started if checkpoint is None else started.then(lambda _: group.load_checkpoint(checkpoint))


def _reward_model(
    session: Session, config: Config, folder: Path | None, processes: Sequence[Process]
) -> RewardModelGroup | RewardEngineGroup | None:
    if folder is None:
        return None
    if config.reward_model.engine == "vllm":
        return RewardEngineGroup(session, config, folder, processes)
    return RewardModelGroup(session, config, "reward_model", folder, processes)
