"""The configuration of an evaluation set: the run's configuration, overridden by the set's own keys."""

from __future__ import annotations

import random
from typing import Any

from megarl.config.evaluation_schema import EvaluationSet
from megarl.config.schema import Config


def config_of_set(config: Config, given: EvaluationSet) -> Config:
    """Return the configuration of an evaluation set.

    Keys that the set leaves out come from the run's data, rewards, rollout and environment sections. The judge, the
    length penalty and the failure limit are disabled. The set has its own seed, so that its procedural prompts are not
    trained on.
    """
    own = {
        "source": given.source,
        "prompt_column": given.prompt_column,
        "answer_column": given.answer_column,
        "system_prompt": given.system_prompt,
        "chat_template": given.chat_template,
    }
    data = {name: value for name, value in own.items() if value is not None} | {"size": given.size, "shuffle": False}
    data |= {"stages": [], "sort_column": None, "weight_column": None, "solved_weight": None}
    data["source_weights"] = {}
    if given.chat_template is False or given.system_prompt == "":
        data["system_prompt"] = None  # only a chat template can format a system message
    if given.source is not None:
        data |= {"options": {}, "more_sources": []}  # valid only for the run's source
    rewards = {"judge": None, "overlong_buffer": None}
    if given.functions is not None:
        rewards["functions"] = given.functions
    environment: dict[str, Any] = {"max_consecutive_failures": None}
    if given.environment is not None:
        environment |= given.environment.model_dump()
    rollout = {
        "temperature": given.temperature,
        "top_p": given.top_p,
        "top_k": given.top_k,
        "max_new_tokens": longest_response(config, given),
    }
    changes = {
        "run": config.run.model_copy(update={"seed": seed_of_set(config, given)}),
        "data": config.data.model_copy(update=data),
        "rewards": config.rewards.model_copy(update=rewards),
        "rollout": config.rollout.model_copy(update=rollout),
        "environment": config.environment.model_copy(update=environment),
    }
    return config.model_copy(update=changes)


def longest_response(config: Config, given: EvaluationSet) -> int:
    """Return the set's maximum number of response tokens."""
    return given.max_new_tokens or config.rollout.max_new_tokens


def seed_of_set(config: Config, given: EvaluationSet, *place: int) -> int:
    """Return the seed for a set, or for a sample given its position (`place`). It is the same in every evaluation, so
    that only the weights differ between steps, and differs from all training seeds."""
    return random.Random(repr(("evaluation", config.run.seed, given.name, *place))).getrandbits(31)
