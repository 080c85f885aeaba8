"""Everybody who takes part in a run, started and connected."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from megarl.cluster.groups.engines import EngineGroup
from megarl.cluster.groups.reward_engines import RewardEngineGroup
from megarl.cluster.groups.reward_model import RewardModelGroup
from megarl.cluster.groups.rewards import RewardWorker
from megarl.cluster.groups.trainers import TrainerGroup
from megarl.cluster.model_folders import ModelFolders
from megarl.cluster.placement import Placement, Process
from megarl.cluster.refit import Refit
from megarl.cluster.session import Session
from megarl.config.schema import Config, Role
from megarl.core.checkpoint import Checkpoint
from megarl.core.metrics import Metric
from megarl.resharding.families import huggingface_holder
from megarl.resharding.planning.plan import Plan
from megarl.resharding.planning.planner import make_plan
from megarl.resharding.transports.shared_memory import SharedMemory


@dataclass(frozen=True, slots=True)
class Workers:
    trainers: TrainerGroup
    critic: TrainerGroup | None
    implicit_reward: TrainerGroup | None
    reward_model: RewardModelGroup | RewardEngineGroup | None
    engines: EngineGroup
    rewards: RewardWorker
    refit: Refit
    export_plan: Plan

    def export(self, out: Path) -> None:
        self.trainers.export(self.export_plan, SharedMemory(self.trainers.publish()), out)

    @property
    def trained(self) -> list[TrainerGroup]:
        """Those whose weights the run changes."""
        return [group for group in (self.trainers, self.critic, self.implicit_reward) if group is not None]

    @contextmanager
    def offloaded(self) -> Iterator[dict[str, Metric]]:
        """The devices have the room inside that the trainers' keys `offload` make, and outside that which sleeping
        engines leave. Yields how much the trainers make."""
        groups = [group for group in self.trained if group.offloads]
        yield {name: metric for group in groups for name, metric in group.offload().items()}
        self.engines.sleep()
        for group in groups:
            group.onload()

    def close(self) -> None:
        for group in self.trained:
            group.close()
        if self.reward_model is not None:
            self.reward_model.close()


def launch_workers(
    session: Session,
    config: Config,
    models: ModelFolders,
    placement: Placement,
    checkpoint: Checkpoint | None,
    engines: EngineGroup | None = None,
) -> Workers:
    """Starts all processes, then plans how weights flow between them. Each model starts from its folder, before
    what it has in the checkpoint, if there is one, is loaded. engines: running ones that were asked for the same (None:
    they are started)."""

    def if_placed(role: Role, folder: Path | None, processes: Sequence[Process]) -> TrainerGroup | None:
        return TrainerGroup(session, config, role, folder, processes) if processes else None

    trainers = TrainerGroup(session, config, "actor", models.actor, placement.trainers)
    critic = if_placed("critic", models.critic, placement.critics)
    implicit_reward = if_placed("implicit_reward", models.implicit_reward, placement.implicit_rewards)
    if engines is None:
        engines = EngineGroup(session, config, models.actor, placement.engines)
        engines.start()  # first: asleep, they leave their memory to the others
    reward_model = _reward_model(session, config, models.reward_model, placement.reward_models)
    if reward_model is not None:
        reward_model.start()
    rewards = RewardWorker(session, config, placement.rewards, reward_model, models)
    rewards.start()
    for group in (trainers, critic, implicit_reward):
        if group is not None:
            group.start()
            if checkpoint is not None:
                group.load_checkpoint(checkpoint)
    export_plan = make_plan(trainers.holders, [huggingface_holder(models.hf_config, config.model.dtype)])
    return Workers(
        trainers=trainers,
        critic=critic,
        implicit_reward=implicit_reward,
        reward_model=reward_model,
        engines=engines,
        rewards=rewards,
        refit=Refit(session, config, trainers, engines, export_plan),
        export_plan=export_plan,
    )


def _reward_model(
    session: Session, config: Config, folder: Path | None, processes: Sequence[Process]
) -> RewardModelGroup | RewardEngineGroup | None:
    if folder is None:
        return None
    if config.reward_model.engine == "vllm":
        return RewardEngineGroup(session, config, folder, processes)
    return RewardModelGroup(session, config, "reward_model", folder, processes)
