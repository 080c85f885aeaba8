"""Which processes a run has, as data: printed before anything starts."""

from __future__ import annotations

import os
from dataclasses import dataclass

from megarl.config.schema import Config, Placed, RewardModel


@dataclass(frozen=True, slots=True)
class Process:
    """One process of the run and the CPU threads that its operators use."""

    role: str
    index: int
    threads: int

    @property
    def name(self) -> str:
        return f"{self.role}-{self.index}"


@dataclass(frozen=True, slots=True)
class Placement:
    """Models and engines share this machine and take turns: each may use all of its cores. Without engines there is
    nobody to reward."""

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
        return ", ".join(f"{len(g)} {g[0].role} × {g[0].threads} threads" for g in groups if g)


def place(config: Config, cores: int | None = None) -> Placement:
    """cores: of this machine (None: those that this process may run on)."""
    cores = cores or len(os.sched_getaffinity(0))
    engine_threads = config.rollout.threads or max(1, cores // (config.rollout.replicas * config.rollout.tp))
    num_engines = 0 if config.on_given_data else config.rollout.replicas
    return Placement(
        trainers=_ranks("trainer", config.actor, cores),
        critics=_ranks("critic", config.critic, cores) if config.has_critic else (),
        reward_models=_reward_models(config.reward_model, cores) if config.has_reward_model else (),
        implicit_rewards=(
            _ranks("implicit-reward", config.implicit_reward, cores) if config.has_implicit_reward else ()
        ),
        engines=tuple(Process("engine", replica, engine_threads) for replica in range(num_engines)),
        rewards=None if config.on_given_data else Process("rewards", 0, 1),
    )


def _reward_models(settings: RewardModel, cores: int) -> tuple[Process, ...]:
    """A process for each rank, or for each engine, which has its other ranks itself."""
    ranks = _ranks("reward-model", settings, cores)
    return ranks if settings.engine == "megatron" else ranks[: settings.layout.dp]


def _ranks(role: str, settings: Placed, cores: int) -> tuple[Process, ...]:
    ranks = settings.layout.world_size
    threads = settings.threads or max(1, cores // ranks)
    return tuple(Process(role, rank, threads) for rank in range(ranks))
