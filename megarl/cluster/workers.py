"""A run's worker groups, and the function that launches them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megarl.cluster.groups.engines import EngineGroup, engine_group
from megarl.cluster.groups.environments import EnvironmentGroup
from megarl.cluster.groups.reward_models import RewardEngineGroup, RewardModelGroup
from megarl.cluster.groups.rewards import RewardGroup
from megarl.cluster.groups.teachers import PlacedTeacher, SelfTeacher, TeacherEngineGroup, TeacherGroup
from megarl.cluster.groups.trainers import PARTS, ImageTrainerGroup, TrainerGroup
from megarl.cluster.pending import Pending, first, join
from megarl.cluster.placement import Placement, Process
from megarl.cluster.refit import Refit
from megarl.cluster.session import Session
from megarl.cluster.trained_models import TrainedModels
from megarl.config.device_spans import reward_model_is_beside_engines, sharing
from megarl.config.model_schema import Role
from megarl.config.schema import Config
from megarl.core import device
from megarl.core.checkpoint import Checkpoint
from megarl.core.metrics import Metric
from megarl.core.timing import ElapsedTime
from megarl.models.run_models import ModelFolders
from megarl.models.trained_model import policy_hf_config
from megarl.resharding.families import huggingface_holder
from megarl.resharding.planning.plan import Plan
from megarl.resharding.planning.planner import make_plan


@dataclass(frozen=True, slots=True)
class Workers:
    """The worker groups in a run, and the refit from trainers to engines."""

    trained: TrainedModels
    reward_model: RewardModelGroup | RewardEngineGroup | None
    engines: EngineGroup
    rewards: RewardGroup
    refit: Refit
    export_plan: Plan
    rewards_share_devices: bool
    """Whether a reward model shares devices with the engines."""
    model_folder: Path
    """Folder of the actor's model."""
    teachers: Sequence[PlacedTeacher | SelfTeacher] = ()
    environments: EnvironmentGroup | None = None
    """Processes that run training rollouts in environments; None if each is a single response to its prompt."""
    evaluation_environments: EnvironmentGroup | None = None
    """Processes that run training and evaluation rollouts in environments; None if there are no such rollouts."""

    @property
    def actor(self) -> TrainerGroup:
        return self.trained.groups["actor"]

    @property
    def critic(self) -> TrainerGroup | None:
        return self.trained.groups.get("critic")

    @property
    def implicit_reward(self) -> TrainerGroup | None:
        return self.trained.groups.get("implicit_reward")

    def export(self, out: Path) -> None:
        for attempt in self.trained.attempts():
            with attempt:
                self.trained.stage_actor_for_sync()
                self.actor.export(self.export_plan, out)

    def switch_to_rollout(self) -> dict[str, Metric]:
        """Offload the trained models as `offload` requires, and resume the engines. Return the bytes freed, as
        metrics."""
        offloaded: dict[str, Metric] = {}
        for attempt in self.trained.attempts():
            with attempt:
                offloaded = self.trained.offload_all().result()
        self.engines.resume().result()
        return offloaded

    def switch_to_scoring(self, is_last: bool) -> None:
        """Put the engines to sleep after a sampling round if a reward model shares their devices. `is_last`: whether
        the engines are refitted before they sample again."""
        if self.rewards_share_devices:
            self._suspend(keeps_weights=not is_last)

    def resume_sampling(self) -> None:
        """Resume the engines before the next sampling round if a reward model used their devices."""
        if self.rewards_share_devices:
            self.engines.resume().result()

    def switch_to_training(self) -> None:
        """Put the engines to sleep after a step's last sampling round, unless they already sleep. A refit follows."""
        if not self.rewards_share_devices:
            self._suspend(keeps_weights=False)

    def suspend_engines(self) -> None:
        """Put the engines to sleep between an evaluation and the next rollouts, without a refit in between."""
        self._suspend(keeps_weights=True)

    def _suspend(self, keeps_weights: bool) -> None:
        self.engines.pause().result()
        self.engines.sleep(keeps_weights).result()

    def take_idle_shares(self) -> dict[str, Metric]:
        """Return the fraction of the time since the last call that engines and ranks were idle, as metrics."""
        shares = {"engines": self.engines.take_idle_share()}
        shares |= {role: group.take_idle_share() for role, group in self.trained.groups.items()}
        return {f"idle/{name}": Metric(pending.result()) for name, pending in shares.items()}

    def alive_reward_models(self) -> dict[str, Metric]:
        """Return the number of live reward models in vLLM as a metric."""
        if not isinstance(self.reward_model, RewardEngineGroup):
            return {}
        return {"reward_models/alive": Metric(len(self.reward_model.names))}

    def close(self) -> None:
        """Destroy the process groups on all ranks. Engines have none to destroy and stop with their processes."""
        self.trained.close()
        if isinstance(self.reward_model, RewardModelGroup):
            self.reward_model.close().result()
        close_teachers(self.teachers).result()


def launch_workers(
    session: Session,
    config: Config,
    models: ModelFolders,
    placement: Placement,
    checkpoint: Checkpoint | None,
    engines: EngineGroup | None = None,
) -> Workers:
    """Start all processes in parallel, and plan the export of the weights. Each model loads its model folder and then
    its state from the checkpoint, if any. `engines` are running engines with the same config; None: start new ones."""
    placed: dict[Role, tuple[Path | None, Sequence[Process]]] = {
        "actor": (models.actor, placement.trainers),
        "critic": (models.critic, placement.critics),
        "implicit_reward": (models.implicit_reward, placement.implicit_rewards),
    }
    trainers = ImageTrainerGroup if config.samples_images else TrainerGroup
    groups: dict[Role, TrainerGroup] = {
        role: trainers(session, with_teacher_folders(config, models), role, folder, processes)
        for role, (folder, processes) in placed.items()
        if folder is not None and processes
    }
    elapsed = ElapsedTime()
    starting: dict[str, Pending[Any]] = {}
    if engines is None:
        engines = engine_group(config)(session, config, models.actor, placement.engines)
        starting["engines"] = engines.start()
        if config.is_colocated and device.on_cuda():
            _await_starts(starting, elapsed)  # models on shared devices need the memory that sleeping engines free
    reward_model = _reward_model(session, config, models.reward_model, placement.reward_models)
    rewards = RewardGroup(session, config, placement.rewards, reward_model, models)
    for name, group in (("reward model", reward_model), ("rewards", rewards)):
        if group is not None:
            starting[name] = group.start()
    teachers = teacher_groups(session, config, models, placement)
    for teacher in teachers:
        starting[teacher.role] = teacher.start()
        if config.teachers.offload:  # a started teacher has offloaded its weights
            _await_starts(starting, elapsed)
    environments = None
    if placement.environments:
        environments = EnvironmentGroup(session, config, models.actor, placement.environments, engines)
        starting["environments"] = environments.start()
    trained = TrainedModels.of(session, config, groups, sharing(config), checkpoint)
    for role, group in groups.items():
        starting[role.replace("_", " ")] = _start_trained(group, checkpoint)
        if trained.sharing[role] and group.offloads:  # free the devices before the next model loads its state
            _await_starts(starting, elapsed)
            group.offload(PARTS).result()
    _await_starts(starting, elapsed)
    actor = groups["actor"]
    policy = policy_hf_config(config, models.hf_config)
    export_plan = make_plan(actor.holders, [huggingface_holder(policy, config.model.dtype)])
    refit = Refit(session, config, actor, engines, export_plan)
    if trained.recovery is not None:
        trained.recovery.disconnect.append(refit.disconnect)
    return Workers(
        model_folder=models.actor,
        trained=trained,
        reward_model=reward_model,
        engines=engines,
        rewards=rewards,
        teachers=[*teachers, *(SelfTeacher(teacher, actor) for teacher in config.self_teachers)],
        environments=environments if config.has_environment else None,
        evaluation_environments=environments,
        refit=refit,
        export_plan=export_plan,
        rewards_share_devices=reward_model_is_beside_engines(config),
    )


def _await_starts(starting: dict[str, Pending[Any]], elapsed: ElapsedTime) -> None:
    """Wait until all groups in `starting` have started, print a line for each, and empty `starting`."""
    while starting:
        started = first(list(starting.values()))
        started.result()
        name = next(name for name, pending in starting.items() if pending is started)
        del starting[name]
        elapsed.print(f"{name}: started")


def _start_trained(group: TrainerGroup, checkpoint: Checkpoint | None) -> Pending[Any]:
    started = group.start()
    return started if checkpoint is None else started.then(lambda _: group.load_checkpoint(checkpoint))


def with_teacher_folders(config: Config, models: ModelFolders) -> Config:
    """Return the config for trainer ranks. With an exact divergence, replace the teachers' paths with local folders,
    because the actor's ranks load the output layers from there."""
    if not config.distills_exactly:
        return config
    return config.model_copy(update={"teachers": config.teachers.in_folders(models.teachers)})


def teacher_groups(session: Session, config: Config, models: ModelFolders, placement: Placement) -> list[PlacedTeacher]:
    """Launch the ranks or engines of the teachers with a path."""
    groups: list[PlacedTeacher] = []
    for (teacher, _), processes in zip(config.placed_teachers, placement.teachers, strict=True):
        kind = TeacherEngineGroup if teacher.engine == "vllm" else TeacherGroup
        groups.append(kind(session, config, teacher, models.teachers[teacher.name], processes))
    return groups


def close_teachers(teachers: Sequence[PlacedTeacher | SelfTeacher]) -> Pending[Any]:
    """Destroy the process groups of teachers in Megatron."""
    return join([teacher.close() for teacher in teachers if isinstance(teacher, TeacherGroup)])


def _reward_model(
    session: Session, config: Config, folder: Path | None, processes: Sequence[Process]
) -> RewardModelGroup | RewardEngineGroup | None:
    if folder is None:
        return None
    if config.reward_model.engine == "vllm":
        return RewardEngineGroup(session, config, folder, processes)
    return RewardModelGroup(session, config, "reward_model", folder, processes)
