"""The configuration of an evaluation set: the run's configuration, overridden by the set's own keys."""

from __future__ import annotations

import random
from typing import Any

from megarl.config.data_schema import is_procedural
from megarl.config.evaluation_schema import EvaluationSet
from megarl.config.schema import Config


def config_of_set(config: Config, evaluation_set: EvaluationSet) -> Config:
    """Return the configuration of an evaluation set. Keys that the set leaves out come from the run's data, rewards,
    rollout and environment sections. The judge, the length penalty and the failure limit are disabled. The set has its
    own seed, so that its procedural prompts are not trained on."""
    names = ("source", "prompt_column", "answer_column", "system_prompt", "chat_template")
    data = {name: value for name in names if (value := getattr(evaluation_set, name)) is not None}
    data |= {"size": evaluation_set.size, "shuffle": False, "stages": [], "source_weights": {}}
    data |= dict.fromkeys(("sort_column", "weight_column", "solved_weight", "response_column"))
    if evaluation_set.chat_template is False or evaluation_set.system_prompt == "":
        data["system_prompt"] = None  # only a chat template can format a system message
    if evaluation_set.image_column is not None:
        data["image_column"] = evaluation_set.image_column or None  # "" stands for a set without images
    elif evaluation_set.source is not None and is_procedural(evaluation_set.source):
        data["image_column"] = None
    if evaluation_set.source is not None:
        data |= {"options": {}, "more_sources": []}  # valid only for the run's source
    rewards: dict[str, Any] = {"judge": None, "overlong_buffer": None}
    if evaluation_set.functions is not None:
        rewards["functions"] = evaluation_set.functions
    environment: dict[str, Any] = {"max_consecutive_failures": None}
    if evaluation_set.environment is not None:
        environment |= evaluation_set.environment.model_dump()
    rollout = {name: getattr(evaluation_set, name) for name in ("temperature", "top_p", "top_k")}
    rollout["max_new_tokens"] = longest_response(config, evaluation_set)
    run = {"seed": seed_of_set(config, evaluation_set)}
    changes = {"run": run, "data": data, "rewards": rewards, "rollout": rollout, "environment": environment}
    changes["teachers"] = {"models": []}  # evaluation uses no teachers, so its rows need no privileged prompts
    return config.model_copy(
        update={name: getattr(config, name).model_copy(update=update) for name, update in changes.items()}
    )


def longest_response(config: Config, evaluation_set: EvaluationSet) -> int:
    """Return the set's maximum number of response tokens."""
    return evaluation_set.max_new_tokens or config.rollout.max_new_tokens


def seed_of_set(config: Config, evaluation_set: EvaluationSet, *place: int) -> int:
    """Return the seed for a set, or for the sample at position `place` in the set. The seed is the same in every
    evaluation, so that only the weights differ between steps. It differs from all training seeds."""
    return random.Random(repr(("evaluation", config.run.seed, evaluation_set.name, *place))).getrandbits(31)
