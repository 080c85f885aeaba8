"""The room that a step's samples take in Ray's object store, in closed form."""

from __future__ import annotations

import math

from megarl.config.schema import Config
from megarl.models.huggingface import Experts

FLOOR_MIB = 256
"""The room for what lies there beside samples: plans of refits, checksums, answers."""

ID_BYTES = 4
LOGPROB_BYTES = 4
FLAG_BYTES = 1 / 8
SCORE_BYTES = 4
OFFSET_BYTES = 4
"""The bytes of the offset at which a token's candidates begin, if the engine keeps only some."""

TEXT_BYTES = 6
"""The bytes of a token's text in UTF-8, at most: English has four or five, Chinese about as many."""

OBJECT_BYTES = 2048
"""The bytes of a sample beside its tokens and their text, and of the scores of one: names, shapes, answers that rewards
compare with."""


def object_store_mib(config: Config, experts: Experts | None) -> int:
    """Returns cluster.object_store_mib, or what follows from the batch: room for all samples of a step, each as long as
    it may be, with the scores of its tokens. Shorter ones leave some of it unused, which takes no memory then. Ray
    writes to the disk what finds no room.

    experts: those of the actor, if it has some, which a token may bring with it.
    """
    if config.cluster.object_store_mib is not None:
        return config.cluster.object_store_mib
    at_once = max(num_samples(config), _num_ahead(config) + most_evaluated(config))
    return FLOOR_MIB + math.ceil(at_once * sample_bytes(config, experts) / 2**20)


def num_samples(config: Config) -> int:
    """Returns the samples that are there at once, at most: of a step those of all rounds of dynamic sampling, which
    stay until its end, and those that are begun for later steps."""
    batch = config.batch
    if config.is_offline:
        return batch.prompts_per_step * config.trained_per_prompt
    per_prompt = batch.samples_per_prompt + config.samples_greedily
    return batch.sampling_rounds * batch.prompts_per_step * per_prompt + _num_ahead(config)


def _num_ahead(config: Config) -> int:
    """Returns the samples that are begun beside those of the step. Those for later steps go on during an
    evaluation."""
    return config.prompts_ahead * (config.batch.samples_per_prompt + config.samples_greedily)


def most_evaluated(config: Config) -> int:
    """Returns the samples of the largest evaluation set; one without a size is not counted."""
    return max(((given.size or 0) * given.samples_per_prompt for given in config.evaluation.sets), default=0)


def sample_bytes(config: Config, experts: Experts | None) -> float:
    """Returns the bytes of one sample as long as it may be, pickled, its scores included."""
    context = config.rollout.context_length
    response = context if config.is_offline else min(config.rollout.max_new_tokens, context)
    num_scores = _num_scores(config)
    tokens = context * (ID_BYTES + TEXT_BYTES) + response * (LOGPROB_BYTES + FLAG_BYTES + num_scores * SCORE_BYTES)
    if config.rollout.top_k is not None:
        tokens += response * (OFFSET_BYTES + config.rollout.top_k * ID_BYTES)
    if experts is not None and config.actor.experts.replay_routes:
        tokens += context * experts.route_bytes
    reading = 0.0
    if config.has_reward_model and config.reward_model.input_format != "ids":  # the sample in tokens of its own
        _, longest = config.context_of(config.reward_model)
        reading = longest * (ID_BYTES + TEXT_BYTES + LOGPROB_BYTES + FLAG_BYTES) + OBJECT_BYTES
    return tokens + reading + (1 + num_scores) * OBJECT_BYTES


def _num_scores(config: Config) -> int:
    """Returns how many models and rewards give every token a score."""
    rewards_tokens = config.has_reward_model or any(function.per_turn for function in config.rewards.functions)
    process_rewards = rewards_tokens and config.algorithm.advantage.credits_to_go
    models = (config.has_critic, config.has_implicit_reward, config.has_reward_model, config.kl_in_reward)
    return sum(models) + process_rewards
