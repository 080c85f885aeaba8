"""The recipe that an evaluation set is loaded and scored by: the run's, with what the set has of its own."""

from __future__ import annotations

import random
from typing import Any

from megarl.config.evaluation_schema import EvaluationSet
from megarl.config.schema import Config


def config_of_set(config: Config, given: EvaluationSet) -> Config:
    """Returns the recipe of a set. Keys that it leaves out are those of the run's data, rewards, rollout and
    environment; no judge compares its samples, their length is not punished, and no number of failures ends the run.
    Its seed is its own, so that procedural prompts are others than those that are trained on."""
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
        data["system_prompt"] = None  # without a chat template nothing says how a system message is written
    if given.source is not None:
        data |= {"options": {}, "more_sources": []}  # those of the run's source
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
    """Returns the most tokens of a response to a prompt of the set, or of a sample in its environment."""
    return given.max_new_tokens or config.rollout.max_new_tokens


def seed_of_set(config: Config, given: EvaluationSet, *place: int) -> int:
    """Returns the seed of a set, or of a sample by its place in it: the same whenever it is evaluated, so that what
    changes from one step to another is the weights alone. No seed of training is made of these words."""
    return random.Random(repr(("evaluation", config.run.seed, given.name, *place))).getrandbits(31)
