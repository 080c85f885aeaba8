"""Keys that belong to something which a run does not have: given another value than the base recipe's, they would
change nothing. A coefficient of 0 is a value like others, which a comparison of several runs may have: keys that belong
to it may stay, and the start of a run says what is left out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import reduce
from typing import Any

from megarl.config.document import show
from megarl.config.run_schema import TrackerName
from megarl.config.schema import Config


@dataclass(frozen=True, slots=True)
class KeyRequirement:
    """Keys that belong to something.

    keys       names of single values or of whole sections
    to         what has to be set for them to be read, in words
    is_there   returns whether a run has it
    but        names in these sections that do not belong to it
    """

    keys: tuple[str, ...]
    to: str
    is_there: Callable[[Config], bool]
    but: tuple[str, ...] = ()


def _learns_values(config: Config) -> bool:
    return config.has_critic or config.actor_has_values


def _of_tracker(name: TrackerName) -> KeyRequirement:
    return KeyRequirement((f"trackers.{name}",), f"run.trackers=[{name}]", lambda config: name in config.run.trackers)


KEY_REQUIREMENTS = (
    KeyRequirement(("algorithm.value", "critic"), "algorithm.advantage.estimator=gae", _learns_values),
    KeyRequirement(
        ("algorithm.value.aggregation", "critic"),
        "critic.shared_backbone=false",
        lambda config: not config.actor_has_values,
        but=("shared_backbone", "warmup_steps"),  # the latter has a rule of its own
    ),
    KeyRequirement(("actor.lora",), "actor.lora.rank", lambda config: config.actor.adapters is not None),
    KeyRequirement(("logprob_check",), "data.format=prompts", lambda config: not config.is_offline),
    KeyRequirement(
        ("logprob_check.mask",), "logprob_check.action=mask", lambda config: config.logprob_check.action == "mask"
    ),
    KeyRequirement(("environment",), "environment.class", lambda config: config.plays_in_environments),
    KeyRequirement(("reward_model",), "reward_model.path", lambda config: config.has_reward_model),
    KeyRequirement(
        ("reward_model.judge",), "reward_model.input_format=question", lambda config: config.reward_model.judges
    ),
    KeyRequirement(
        ("evaluation",),
        "evaluation.sets",
        lambda config: bool(config.evaluation.sets),
        but=("best.metric", "best.mode"),  # the first has a rule of its own
    ),
    KeyRequirement(
        ("evaluation.best.mode",),
        "evaluation.best.metric",
        lambda config: config.evaluation.best.metric is not None,
    ),
    KeyRequirement(
        ("algorithm.correction.weight_limit", "algorithm.correction.weight_floor"),
        "algorithm.correction.weight",
        lambda config: config.algorithm.correction.weight is not None,
    ),
    KeyRequirement(
        ("algorithm.correction.mask_low", "algorithm.correction.mask_high"),
        "algorithm.correction.mask",
        lambda config: config.algorithm.correction.mask is not None,
    ),
    KeyRequirement(
        ("algorithm.trust_region",),
        "algorithm.trust_region.kl_limit",
        lambda config: config.algorithm.trust_region.kl_limit is not None,
    ),
    KeyRequirement(("batch.epochs_kl_limit",), "batch.epochs above 1", lambda config: config.batch.epochs > 1),
    KeyRequirement(
        ("rollout.kv_cache_on_update",), "rollout.max_staleness", lambda config: config.rollout.max_staleness > 0
    ),
    KeyRequirement(("data.solved_above",), "data.solved_weight", lambda config: config.data.solved_weight is not None),
    KeyRequirement(
        ("algorithm.kl.adaptive_horizon",),
        "algorithm.kl.adaptive_target",
        lambda config: config.algorithm.kl.adaptive_target is not None,
    ),
    KeyRequirement(
        ("trackers.timeout_s", "trackers.project"), "run.trackers=[wandb]", lambda config: bool(config.run.trackers)
    ),
    *(_of_tracker(name) for name in ("wandb", "mlflow", "trackio")),
    KeyRequirement(("run.profile.ranks",), "run.profile.steps", lambda config: bool(config.run.profile.steps)),
)


def unused_keys(config: Config, defaults: Mapping[str, Any]) -> list[str]:
    """Returns a line for each key that is not read and differs from the defaults, the values of the base recipe."""
    configured = config.model_dump()
    return [
        f"{key}={show(value)}: nothing reads it without {owner.to}; set that, or {key}={show(default)}"
        for owner in KEY_REQUIREMENTS
        if not owner.is_there(config)
        for section in owner.keys
        for key, value, default in _changed(section, *(_at(values, section) for values in (configured, defaults)))
        if key.removeprefix(f"{section}.") not in owner.but
    ]


def _at(values: Mapping[str, Any], key: str) -> Any:
    return reduce(lambda section, name: section[name], key.split("."), values)


def _changed(key: str, value: Any, default: Any) -> Iterator[tuple[str, Any, Any]]:
    """Yields key, value and default of each single value that differs."""
    if isinstance(value, dict) and default:
        for name, inner in value.items():
            yield from _changed(f"{key}.{name}", inner, default[name])
    elif value != default:
        yield key, value, default
