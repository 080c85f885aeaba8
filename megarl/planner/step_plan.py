"""Predicts the memory, time and bottlenecks of a step for one recipe on a cluster."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from megarl.cluster.memory.parameters import Models
from megarl.cluster.memory.rank import item_bytes, stage_memory
from megarl.cluster.memory.shared_gpu import Load
from megarl.config.device_spans import sharing
from megarl.config.schema import Config
from megarl.models.denoiser import DenoiserShape
from megarl.planner.hardware import GIB, HOST_LINK_SHARE, STORAGE_GB_S, Cluster
from megarl.planner.image_rollout_time import image_rollout_time
from megarl.planner.phases import (
    COPIES,
    copies_bytes,
    host_memory,
    host_parts,
    max_saved_bytes,
    optimizer_share_in_host,
    overfull,
    phase_loads,
    refusal,
)
from megarl.planner.refit_time import RefitTime, refit_time
from megarl.planner.rollout_time import RolloutTime, rollout_time
from megarl.planner.train_time import TrainTime, train_time
from megarl.planner.workload import ImageWorkload, TextWorkload, Workload


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Durations of the phases in a step.

    Attributes:
        moving: seconds for moving states to host memory and back.
        training: times of each trained model and each teacher.
        side_by_side: whether models on separate devices train at the same time. Teachers compute before other models.
    """

    rollout: RolloutTime | None
    training: Mapping[str, TrainTime]
    refit: RefitTime | None
    moving: float
    side_by_side: bool

    @property
    def phases(self) -> dict[str, float]:
        """Duration of each phase in seconds, in the order in which a step runs the phases."""
        phases = {} if self.rollout is None else {"rollout": self.rollout.seconds}
        for role, time in self.training.items():
            phases |= {f"{role}: passes": sum(time.passes.values()), f"{role}: update": sum(time.update.values())}
        if self.refit is not None:
            phases["refit"] = self.refit.seconds
        return {name: seconds for name, seconds in (phases | {"offload": self.moving}).items() if seconds}

    @property
    def spans(self) -> dict[str, tuple[float, float]]:
        """Start and end time of each phase in seconds. If models train side by side, all forward-only passes finish
        before the first update starts."""
        spans: dict[str, tuple[float, float]] = {}
        now, batch, until = 0.0, "", 0.0
        for name, seconds in self._in_order():
            kind = name.partition(": ")[2] if self.side_by_side else ""
            if not kind or kind != batch:
                now = until
            batch = kind
            spans[name] = (now, now + seconds)
            until = max(until, now + seconds)
        return spans

    def _in_order(self) -> list[tuple[str, float]]:
        """Return the phases and their durations, ordered by start time."""
        order = {"passes": 1, "update": 2}
        phases = list(self.phases.items())
        if not self.side_by_side:
            return phases
        training = [phase for phase in phases if ": " in phase[0]]
        training.sort(key=lambda phase: order[phase[0].partition(": ")[2]])
        before = [phase for phase in phases if phase[0] == "rollout"]
        return [*before, *training, *(phase for phase in phases if phase[0] in ("refit", "offload"))]

    @property
    def seconds(self) -> float:
        return max((end for _, end in self.spans.values()), default=0.0)

    @property
    def training_seconds(self) -> float:
        """Seconds from the start of the first forward-only pass to the end of the last update."""
        ends = [span for name, span in self.spans.items() if ": " in name]
        return max(end for _, end in ends) - min(start for start, _ in ends)

    @property
    def bounds(self) -> dict[str, str]:
        """The bottleneck of each phase: the part that takes the most time, with its share of the time unless the parts
        overlap."""
        parts: dict[str, Mapping[str, float]] = {} if self.rollout is None else {"rollout": self.rollout.parts}
        for role, time in self.training.items():
            parts |= {f"{role}: passes": time.passes, f"{role}: update": time.update}
        bounds = {name: _largest(phase_parts) for name, phase_parts in parts.items() if phase_parts}
        if self.refit is not None:
            bounds["refit"] = max(self.refit.parts, key=self.refit.parts.__getitem__)
        return bounds

    def overlapped(self, is_colocated: bool) -> float | None:
        """Return the minimum duration of a step in seconds if rollout and training overlap, or None for offline data.
        On separate devices, the slower of rollout and training determines the duration, as in one-step-off training. On
        shared GPUs, the overlap only saves the time in which engines wait for the last responses."""
        if self.rollout is None or self.refit is None:
            return None
        training = self.training_seconds
        if is_colocated:
            return self.rollout.full + training + self.refit.seconds
        return max(self.rollout.seconds, training) + self.refit.seconds


def _largest(parts: Mapping[str, float]) -> str:
    name = max(parts, key=parts.__getitem__)
    return f"{name} ({100 * parts[name] / sum(parts.values()):.0f} %)"


@dataclass(frozen=True, slots=True)
class SaveTime:
    """Time and size of a checkpoint save.

    Attributes:
        node_bytes: largest number of bytes that any node writes.
        copying: minimum seconds for the copy to host memory. Training is blocked during the copy.
        writing: seconds for writing the files. Training continues during the write if checkpoint.background is set.
    """

    node_bytes: float
    copying: float
    writing: float


@dataclass(frozen=True, slots=True)
class StepPlan:
    """The plan for running a recipe on a cluster.

    Attributes:
        loads: memory load of the fullest GPU in each phase.
        host: bytes in a node's host memory, keyed by purpose.
        save: time of a checkpoint save, or None if the recipe saves no checkpoints.
        copies: bytes of shared memory for copies of the trained models' state on the fullest node, even if none are
            made.
    """

    config: Config
    cluster: Cluster
    workload: Workload
    loads: tuple[Load, ...]
    host: Mapping[str, float]
    times: StepTimes
    save: SaveTime | None
    copies: float

    @property
    def problem(self) -> str | None:
        """The reason why the recipe does not fit, with the arithmetic and a fix, or None if it fits."""
        if load := overfull(self.loads, self.cluster):
            return refusal(load, self.cluster)
        needed, available = sum(self.host.values()), host_memory(self.cluster)
        if needed <= available:
            return None
        parts = " + ".join(f"{size / GIB:.1f} ({what})" for what, size in self.host.items())
        remedies = [*(["cluster.replace_ranks=false"] if COPIES in self.host else []), "checkpoint.background=false"]
        return (
            f"--gpus {self.cluster.num_gpus}x{self.cluster.name}: a node's host memory would hold {parts} = "
            f"{needed / GIB:.1f} GiB, but it has only {available / GIB:.0f} GiB. Fix: remove states "
            f"from actor.offload, or set {' or '.join(remedies)}"
        )

    @property
    def fullest(self) -> Load:
        return max(self.loads, key=lambda load: load.total)


def plan_step(config: Config, models: Models, workload: Workload, cluster: Cluster) -> StepPlan:
    """Return the plan for a recipe. The recipe's layouts must satisfy all layout rules."""
    return StepPlan(
        config=config,
        cluster=cluster,
        workload=workload,
        loads=tuple(phase_loads(config, models, workload, cluster)),
        host=host_parts(config, models, workload, cluster),
        times=step_times(config, models, workload, cluster),
        save=save_time(config, models, cluster),
        copies=copies_bytes(config, models, cluster),
    )


def step_times(config: Config, models: Models, workload: Workload, cluster: Cluster) -> StepTimes:
    num_bytes, beside = item_bytes(config), sharing(config)
    training: dict[str, TrainTime] = {}
    moving = 0.0
    for name, model in models.teachers.items():
        settings = config.teacher_section(name)
        training[f"teacher {name}"] = train_time(settings, model, workload, cluster, num_bytes, num_passes=1, epochs=0)
        moves = settings.offload and settings.engine == "megatron"
        weights = model.of_stage(settings.layout, 0).weight_bytes(num_bytes) if moves else 0
        moving += 2 * weights / (cluster.gpu.host_gb_s * 1e9 * HOST_LINK_SHARE)
    for role, model in models.trained.items():
        settings = config.placed(role)
        layout = settings.layout
        empty = stage_memory(model.shape, layout, 0, model.of_stage(layout, 0), num_bytes, 0, 0, 1)
        in_host = optimizer_share_in_host(settings, empty)
        passes = workload.passes if role == "actor" else 1
        epochs = config.epochs(settings)
        if role == "actor" and config.algorithm.trust_region.kl_limit is not None:
            # Assume that TRPO's line search takes one pass. Each Fisher-vector product takes two forward passes and one
            # gradient.
            products = config.algorithm.trust_region.iterations
            passes, epochs = passes + 2 * products + 1, 1 + products
        training[role] = train_time(settings, model, workload, cluster, num_bytes, passes, epochs, in_host)
        # Gradients are freed instead of moved. The actor's weights move twice if the critic runs between the actor's
        # passes and its update.
        times = 2 if role == "actor" and workload.passes and "critic" in beside[role] else 1
        sizes = {"parameters": times * empty.weights, "optimizer": empty.optimizer * (1 - in_host)}
        moved = sum(size for part, size in sizes.items() if part in settings.offload)
        moving += 2 * moved / (cluster.gpu.host_gb_s * 1e9 * HOST_LINK_SHARE)
    side_by_side = not any(beside.values()) and not models.teachers
    if workload.is_offline:
        return StepTimes(None, training, None, 0.0, side_by_side)
    actor = models.actor
    if isinstance(workload, ImageWorkload):
        assert isinstance(actor.shape, DenoiserShape), "a language model samples no images"
        rollout = image_rollout_time(config, actor.shape, workload, cluster)
    else:
        assert isinstance(workload, TextWorkload), f"{type(workload).__name__} is not sampled"
        rollout = rollout_time(config, actor, workload, cluster, models.draft)
    return StepTimes(rollout, training, refit_time(config, actor, cluster), moving, side_by_side)


def save_time(config: Config, models: Models, cluster: Cluster) -> SaveTime | None:
    """Return the time of a checkpoint save, or None if the recipe saves no checkpoints. All ranks write their own
    ranges concurrently. Every rank on a node is assumed to write as much as the largest rank."""
    if not config.checkpoint.may_be_saved:
        return None
    sizes = {role: max_saved_bytes(config, config.placed(role).layout, model) for role, model in models.trained.items()}
    rank_bytes = max(sum(sizes[one] for one in (role, *others)) for role, others in sharing(config).items())
    node_bytes = rank_bytes * min(cluster.num_gpus, cluster.gpus_per_node)
    return SaveTime(
        node_bytes=node_bytes,
        copying=rank_bytes / (cluster.gpu.host_gb_s * 1e9 * HOST_LINK_SHARE),
        writing=node_bytes / (STORAGE_GB_S * 1e9),
    )
