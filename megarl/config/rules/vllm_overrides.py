"""Rules for `rollout.vllm_overrides` and `reward_model.vllm_overrides`."""

from __future__ import annotations

from collections.abc import Callable

from megarl.config.document import show
from megarl.config.schema import Config
from megarl.config.vllm_arguments import MANAGED, REFITTABLE


def overrides_exclude_managed_arguments(config: Config) -> str | None:
    extras = {"rollout": config.rollout.vllm_overrides, "reward_model": config.reward_model.vllm_overrides}
    lines = []
    for section, homes in MANAGED.items():
        for name in homes.keys() & extras[section].keys():
            home = homes[name]
            why = (
                f"megarl sets this argument from {home}. Fix: set {home} instead"
                if home
                else "megarl depends on its own value for this argument. Fix: remove the override"
            )
            lines.append(f"{section}.vllm_overrides.{name}={show(extras[section][name])}: {why}")
    return "\n".join(sorted(lines)) or None


def overrides_keep_weights_refittable(config: Config) -> str | None:
    lines = []
    for name, (value, why) in REFITTABLE.items():
        override = config.rollout.vllm_overrides.get(name, value)
        if override != value:
            lines.append(f"rollout.vllm_overrides.{name}={show(override)}: {why}. Fix: remove the override")
    return "\n".join(lines) or None


RULES: tuple[Callable[[Config], str | None], ...] = (
    overrides_exclude_managed_arguments,
    overrides_keep_weights_refittable,
)
