"""Rules across keys, one module for each group of sections, and `check` to apply them all.

A rule is a generator named after the condition that it checks. It yields one line per violating key, with its value,
the arithmetic and the remedy. Each module lists its rules in RULES. `no_effect` is the table of keys that have an
effect only under a condition. Rules that relate keys to a model's config.json are in `megarl.models.rules`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from megarl.config.evaluation import config_of_set
from megarl.config.model_schema import Placed, entry_prefix, layout_key
from megarl.config.rules import (
    actor,
    algorithm,
    cluster,
    data,
    environment,
    evaluation,
    images,
    layout,
    models,
    rewards,
    rollout,
    run,
    teachers,
)
from megarl.config.rules.no_effect import keys_without_effect
from megarl.config.schema import Config
from megarl.config.violations import raise_all

SECTIONS = (run, data, algorithm, images, rollout, actor, models, rewards, teachers, environment, evaluation, cluster)


def check(config: Config, defaults: Mapping[str, Any]) -> None:
    """Check all rules. Keys without effect are compared with the base recipe's values (`defaults`). Raise a UserError
    if rules are violated; the message has one line per violation."""
    violations = (
        *(rule(config) for section in SECTIONS for rule in section.RULES),
        *(_of_layout(model) for model in config.all_placed),
        *(rule(item, config_of_set(config, item)) for item in config.evaluation.sets for rule in evaluation.SET_RULES),
        *(_of_placed(config, model) for model in config.all_placed),
        *(rule(config, model) for model in config.all_trained for rule in models.TRAINED_RULES),
        keys_without_effect(config, defaults),
    )
    raise_all(line for lines in violations for line in lines)


def _of_layout(placed: Placed) -> Iterator[str]:
    for rule in layout.RULES:
        yield from (f"{entry_prefix(placed)}{line}" for line in rule(f"{layout_key(placed)}.", placed.layout))


def _of_placed(config: Config, placed: Placed) -> Iterator[str]:
    for rule in models.PLACED_RULES:
        yield from (f"{entry_prefix(placed)}{line}" for line in rule(config, placed))
