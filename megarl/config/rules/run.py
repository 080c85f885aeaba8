"""Rules for section `run`."""

from __future__ import annotations

from collections.abc import Callable

from megarl.config.schema import Config


def trackers_are_named_once(config: Config) -> str | None:
    names = config.run.trackers
    twice = sorted({name for name in names if names.count(name) > 1})
    if not twice:
        return None
    return f"run.trackers=[{', '.join(names)}]: {twice[0]} is listed twice. Fix: list it once"


def profiled_steps_are_steps_of_the_run(config: Config) -> str | None:
    late = [step for step in config.run.profile.steps if step > config.run.steps]
    if not late:
        return None
    return (
        f"run.profile.steps: step {late[0]} is after the last step of the run (run.steps={config.run.steps}). Fix: "
        f"list only steps up to {config.run.steps}"
    )


def profiled_ranks_are_ranks_of_a_model(config: Config) -> str | None:
    """A rank in run.profile is profiled in every trained model that has a rank with this number."""
    if not config.run.profile.steps:
        return None
    largest = max(trained.layout.world_size for trained in config.all_trained)
    beyond = [rank for rank in config.run.profile.ranks if rank >= largest]
    if not beyond:
        return None
    return (
        f"run.profile.ranks: no trained model has a rank {beyond[0]}, because the largest has {largest} ranks. Fix: "
        f"list only ranks below {largest}"
    )


RULES: tuple[Callable[[Config], str | None], ...] = (
    trackers_are_named_once,
    profiled_steps_are_steps_of_the_run,
    profiled_ranks_are_ranks_of_a_model,
)
