"""The configuration of an evaluation set: the run's configuration, overridden by the set's own keys."""

from __future__ import annotations

import random
from typing import Any

from megarl.config.evaluation_schema import EvaluationSet
from megarl.config.schema import Config


def config_of_set(config: Config, evaluation_set: EvaluationSet) -> Config:
    """Return the configuration of an evaluation set.

    Keys that the set leaves out come from the run's data, rewards, rollout and environment sections. The judge, the
    length penalty and the failure limit are disabled. The set has its own seed, so that its procedural prompts are not
    trained on.
    """
    overrides = {
        "source": evaluation_set.source,
        "prompt_column": evaluation_set.prompt_column,
        "answer_column": evaluation_set.answer_column,
        "system_prompt": evaluation_set.system_prompt,
        "chat_template": evaluation_set.chat_template,
    }
    data = {name: value for name, value in overrides.items() if value is not None} | {
        "size": evaluation_set.size,
        "shuffle": False,
    }
    data |= {"stages": [], "sort_column": None, "weight_column": None, "solved_weight": None}
    data["source_weights"] = {}
    if evaluation_set.chat_template is False or evaluation_set.system_prompt == "":
        data["system_prompt"] = None  # only a chat template can format a system message
    if evaluation_set.source is not None:
        data |= {"options": {}, "more_sources": []}  # valid only for the run's source
    rewards = {"judge": None, "overlong_buffer": None}
    if evaluation_set.functions is not None:
        rewards["functions"] = evaluation_set.functions
    environment: dict[str, Any] = {"max_consecutive_failures": None}
    if evaluation_set.environment is not None:
        environment |= evaluation_set.environment.model_dump()
    rollout = {
        "temperature": evaluation_set.temperature,
        "top_p": evaluation_set.top_p,
        "top_k": evaluation_set.top_k,
        "max_new_tokens": longest_response(config, evaluation_set),
    }
    changes = {
        "run": config.run.model_copy(update={"seed": seed_of_set(config, evaluation_set)}),
        "data": config.data.model_copy(update=data),
        "rewards": config.rewards.model_copy(update=rewards),
        "rollout": config.rollout.model_copy(update=rollout),
        "environment": config.environment.model_copy(update=environment),
    }
    return config.model_copy(update=changes)


def longest_response(config: Config, evaluation_set: EvaluationSet) -> int:
    """Return the set's maximum number of response tokens."""
    return evaluation_set.max_new_tokens or config.rollout.max_new_tokens


def seed_of_set(config: Config, evaluation_set: EvaluationSet, *place: int) -> int:
    """Return the seed for a set, or for the sample at position `place` in the set.

    The seed is the same in every evaluation, so that only the weights differ between steps. It differs from all
    training seeds.
    """
    return random.Random(repr(("evaluation", config.run.seed, evaluation_set.name, *place))).getrandbits(31)
