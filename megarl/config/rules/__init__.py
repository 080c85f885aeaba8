"""The rules across keys, a module for each section of the recipe, and `check`, which asks all of them.

A rule is a function named as what it says. It returns None where it is kept, otherwise a line for each key that breaks
it, with the value, the arithmetic and the remedy. Each module lists its own in RULES. `model` has those between the
recipe and a model's config.json, which can be asked only where that is at hand.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megarl.config.rules import (
    advantage,
    batch,
    cluster,
    correction,
    critic,
    data,
    environment,
    evaluation,
    experts,
    kl,
    layout,
    logprob_check,
    lora,
    objective,
    placed,
    reward_model,
    rewards,
    rollout,
    run,
    sandbox,
    trained,
    trust_region,
    vllm_overrides,
)
from megarl.config.rules.no_effect import keys_without_effect
from megarl.config.schema import Config
from megarl.config.violations import raise_all

SECTIONS = (
    *(batch, data, advantage, objective, correction, logprob_check, kl, rollout, vllm_overrides, lora, critic),
    *(reward_model, rewards, environment, sandbox, evaluation, cluster, run, experts, trust_region),
)


def check(config: Config, defaults: Mapping[str, Any]) -> None:
    """Checks the keys against each other, and those that nothing reads against the base recipe's values (defaults).
    Raises UserError with one line per broken rule."""
    raise_all(
        [
            *(rule(config) for section in SECTIONS for rule in section.RULES),
            *(rule(f"{model.section}.layout.", model.layout) for model in config.all_placed for rule in layout.RULES),
            *(rule(config, model) for model in config.all_placed for rule in placed.RULES),
            *(rule(config, model) for model in config.all_trained for rule in trained.RULES),
            *keys_without_effect(config, defaults),
        ]
    )
