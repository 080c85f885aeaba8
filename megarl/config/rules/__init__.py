"""Rules across keys, one module for each group of sections, and `check`, which applies them all.

A rule is a generator named after the condition that it checks. It yields one line per violating key, with its value,
the arithmetic and the remedy. Each module lists its rules in RULES. `no_effect` is the table of keys that have an
effect only under a condition. Rules that relate keys to a model's config.json are in `megarl.models.rules`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megarl.config.evaluation import config_of_set
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
        *(rule(f"{model.section}.layout.", model.layout) for model in config.all_placed for rule in layout.RULES),
        *(rule(item, config_of_set(config, item)) for item in config.evaluation.sets for rule in evaluation.SET_RULES),
        *(rule(config, model) for model in config.all_placed for rule in models.PLACED_RULES),
        *(rule(config, model) for model in config.all_trained for rule in models.TRAINED_RULES),
        keys_without_effect(config, defaults),
    )
    raise_all(line for lines in violations for line in lines)
