"""The processes of a run and their GPUs, as data that is printed before anything starts."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from megarl.config.schema import Config, MegatronRole, Placed, RewardModel, Rollout
from megarl.resharding.piece import Holder

NAMES: dict[MegatronRole, str] = {
    "actor": "trainer",
    "critic": "critic",
    "reward_model": "reward-model",
    "implicit_reward": "implicit-reward",
}
"""The names of a model's processes, by its role."""

ENGINE = "engine"
MOST_REWARDS = 16
"""The number of processes for the user's reward functions that a machine with many cores starts by itself."""

VISIBLE = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True, slots=True)
class Process:
    """One process of the run.

    threads   the CPU threads that its operators use; of the rewards, the processes that call the user's functions
    gpus      the GPUs that its ranks compute on, in their order: numbers among those that the run may use; none on CPU
    reads     other GPUs, with weights that it may read
    """

    role: str
    index: int
    threads: int
    gpus: tuple[int, ...] = ()
    reads: tuple[int, ...] = ()

    @property
    def name(self) -> str:
        return f"{self.role}-{self.index}"

    def environment(self, inherited: str | None) -> dict[str, str]:
        """Returns the variables by which the process sees its GPUs, before those that it reads. inherited: the run's
        value of CUDA_VISIBLE_DEVICES."""
        numbers = (*self.gpus, *self.reads)
        names = inherited.split(",") if inherited else [str(gpu) for gpu in range(max(numbers, default=0) + 1)]
        return {VISIBLE: ",".join(names[gpu] for gpu in numbers)} if numbers else {}

    def hold(self, holders: Sequence[Holder]) -> list[Holder]:
        """Returns the holders of its ranks, on their GPUs."""
        devices = self.gpus or (None,) * len(holders)
        return [replace(holder, device=device) for holder, device in zip(holders, devices, strict=True)]


@dataclass(frozen=True, slots=True)
class Placement:
    """The processes of a run. Models and engines take turns on this machine, so that on CPU each may use all of its
    cores. Without engines there is no process for rewards."""

    trainers: tuple[Process, ...]
    critics: tuple[Process, ...]
    reward_models: tuple[Process, ...]
    implicit_rewards: tuple[Process, ...]
    engines: tuple[Process, ...]
    rewards: Process | None

    def describe(self) -> str:
        groups = (
            *(self.trainers, self.critics, self.reward_models, self.implicit_rewards, self.engines),
            (self.rewards,) if self.rewards is not None else (),
        )
        return ", ".join(f"{len(g)} {g[0].role} × {g[0].threads} threads{_where(g)}" for g in groups if g)


def place(config: Config, cores: int | None = None, on_gpus: bool = False) -> Placement:
    """Places all processes of a run. cores: the machine's cores (None: those that this process may run on)."""
    cores = cores or len(os.sched_getaffinity(0))
    spans = gpu_spans(config) if on_gpus else {}
    return Placement(
        trainers=_ranks(config.actor, cores, spans),
        critics=_ranks(config.critic, cores, spans) if config.has_critic else (),
        reward_models=_ranks(config.reward_model, cores, spans) if config.has_reward_model else (),
        implicit_rewards=_ranks(config.implicit_reward, cores, spans) if config.has_implicit_reward else (),
        engines=() if config.is_offline else _engines(config.rollout, cores, spans),
        rewards=None if config.is_offline else Process("rewards", 0, _reward_processes(config, cores)),
    )


def _reward_processes(config: Config, cores: int) -> int:
    if not config.rewards.functions and config.rewards.judge is None:
        return 1
    return config.rewards.processes or min(cores, MOST_REWARDS)


def gpu_spans(config: Config) -> dict[str, range]:
    """Returns the GPUs of each role, one for each of its ranks, by the name of its processes. Colocated, all spans
    begin with the first GPU; else each begins where the one before ends."""
    ranks = {NAMES[placed.section]: placed.layout.world_size for placed in config.all_placed}
    if not config.is_offline:
        ranks[ENGINE] = config.rollout.replicas * config.rollout.tp
    spans, first = {}, 0
    for role, count in ranks.items():
        spans[role] = range(first, first + count)
        first += 0 if config.is_colocated else count
    return spans


def _ranks(settings: Placed, cores: int, spans: Mapping[str, range]) -> tuple[Process, ...]:
    """Returns a process for each rank; for a reward model in vLLM one for each engine, which starts its ranks
    itself."""
    role, layout = NAMES[settings.section], settings.layout
    threads, gpus = settings.threads or max(1, cores // layout.world_size), spans.get(role, range(0))
    size = layout.tp if isinstance(settings, RewardModel) and settings.engine == "vllm" else 1
    return tuple(Process(role, index, threads, _share(gpus, index, size)) for index in range(layout.world_size // size))


def _engines(rollout: Rollout, cores: int, spans: Mapping[str, range]) -> tuple[Process, ...]:
    threads = rollout.threads or max(1, cores // (rollout.replicas * rollout.tp))
    gpus_by_replica = [_share(spans.get(ENGINE, range(0)), replica, rollout.tp) for replica in range(rollout.replicas)]
    weights = spans.get(NAMES["actor"], range(0))
    return tuple(
        Process(ENGINE, replica, threads, gpus, reads=tuple(gpu for gpu in weights if gpu not in gpus))
        for replica, gpus in enumerate(gpus_by_replica)
    )


def _share(gpus: range, index: int, size: int) -> tuple[int, ...]:
    """Returns the GPUs of the process with this index, of `size` ranks."""
    return tuple(gpus[index * size : (index + 1) * size])


def _where(group: Sequence[Process]) -> str:
    gpus = [gpu for process in group for gpu in process.gpus]
    if not gpus:
        return ""
    return f" on GPU {gpus[0]}" if len(gpus) == 1 else f" on GPUs {gpus[0]}-{gpus[-1]}"
