"""Rules for `rollout.vllm_overrides` and `reward_model.vllm_overrides`."""

from __future__ import annotations

from collections.abc import Callable

from megarl.config.document import show
from megarl.config.schema import Config
from megarl.config.vllm_arguments import GIVEN, REFITTABLE


def arguments_of_vllm_are_given_once(config: Config) -> str | None:
    extras = {"rollout": config.rollout.vllm_overrides, "reward_model": config.reward_model.vllm_overrides}
    lines = []
    for section, homes in GIVEN.items():
        for name in homes.keys() & extras[section].keys():
            home = homes[name]
            why = (
                f"{home} determines it. Fix: set {home}"
                if home
                else "megarl depends on its own value. Fix: leave it out"
            )
            lines.append(f"{section}.vllm_overrides.{name}={show(extras[section][name])}: {why}")
    return "\n".join(sorted(lines)) or None


def weights_stay_where_refits_write_them(config: Config) -> str | None:
    lines = []
    for name, (value, why) in REFITTABLE.items():
        override = config.rollout.vllm_overrides.get(name, value)
        if override != value:
            lines.append(f"rollout.vllm_overrides.{name}={show(override)}: {why}. Fix: leave it out")
    return "\n".join(lines) or None


RULES: tuple[Callable[[Config], str | None], ...] = (
    arguments_of_vllm_are_given_once,
    weights_stay_where_refits_write_them,
)
