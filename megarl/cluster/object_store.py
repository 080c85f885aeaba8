"""Closed-form estimate of the space for samples in Ray's object store."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from megarl.config.schema import Config
from megarl.models.huggingface import Experts
from megarl.resharding.piece import ITEM_BYTES

if TYPE_CHECKING:
    from megarl.data.offline import OfflineData
    from megarl.data.prompts import PromptSet

FLOOR_MIB = 256
"""Space in MiB for objects other than samples: refit plans, checksums and call results."""

ID_BYTES = 4
LOGPROB_BYTES = 4
FLAG_BYTES = 1 / 8
SCORE_BYTES = 4
OFFSET_BYTES = 4
"""Bytes per token for the offset to its candidate tokens, with rollout.top_k."""

TEXT_BYTES = 6
"""Assumed upper bound on the mean number of UTF-8 bytes per token. English has four to five, Chinese about as many."""

RGB_BYTES, PIXEL_BYTES = 3, 4
"""Bytes per pixel of a decoded image, and an upper bound on the bytes per pixel of its latents."""

ENCODED_BYTES = 2**20
"""Assumed size in bytes of the encoded images that an environment adds to a sample and, before the data is read, of a
row's images."""

EMBEDDING_BYTES = 2 * 4 * max(512 * 2560, 333 * 4096)
"""Size of the embeddings of a caption of maximum length and of the empty caption, with the text encoders of Z-Image or
of Stable Diffusion 3."""

OBJECT_BYTES = 2048
"""Bytes per sample besides its tokens and text: names, shapes, reference answers, and metadata of its scores."""


def object_store_mib(
    config: Config, experts: Experts | None, hidden_sizes: Sequence[int] = (), encoded: int | None = None
) -> int:
    """Return the object store's size in MiB: cluster.object_store_mib or, by default, enough for all samples that
    exist at the same time, at maximum length, with per-token scores, the teachers' states and encoded images. Unused
    space takes no memory. Ray spills to disk if the store is full.

    Args:
        experts: the actor's experts, if any; samples may carry the routes to them.
        hidden_sizes: hidden size of each teacher.
        encoded: result of `image_bytes`; None: estimate it without the data.
    """
    if config.cluster.object_store_mib is not None:
        return config.cluster.object_store_mib
    encoded = image_bytes(config) if encoded is None else encoded
    num_bytes = num_samples(config) * sample_bytes(config, experts) + states_bytes(config, hidden_sizes) + encoded
    return FLOOR_MIB + math.ceil(num_bytes / 2**20)


def image_bytes(
    config: Config, data: PromptSet | OfflineData | None = None, evaluation: Iterable[PromptSet] = ()
) -> int:
    """Return an upper bound on the size in bytes of all encoded images that exist at the same time. Without `data`,
    assume ENCODED_BYTES per row, and that evaluation sets without a configured size are empty.

    Args:
        data, evaluation: the data of the run and of each evaluation set.
    """
    if not config.model.vision:
        return 0
    num_rows = (1 + num_retained_steps(config)) * config.batch.prompts_per_step
    if not config.is_offline:
        num_rows = num_rows * config.batch.sampling_rounds + config.prompts_ahead
    added = added_image_bytes(config)
    if data is None:
        return added + (num_rows + sum(settings.size or 0 for settings in config.evaluation.sets)) * ENCODED_BYTES
    # Weighted sampling may draw a row every time. Otherwise, rows repeat once per epoch, and the drawn rows may
    # begin with the last row of an epoch.
    max_repeats = num_rows if config.data.draws_by_weight else (num_rows - 2) // len(data) + 2
    return added + data.row_images.num_bytes(num_rows, max_repeats) + evaluation_image_bytes(evaluation)


def added_image_bytes(config: Config) -> int:
    """Return the assumed size in bytes of the encoded images that environments add to samples, ENCODED_BYTES each."""
    return num_samples(config) * ENCODED_BYTES if config.model.vision and config.plays_in_environments else 0


def evaluation_image_bytes(evaluation: Iterable[PromptSet]) -> int:
    """Return the size in bytes of the encoded images of all evaluation sets; see `num_evaluated`."""
    return sum(prompts.row_images.num_bytes() for prompts in evaluation)


def states_bytes(config: Config, hidden_sizes: Sequence[int]) -> int:
    """Return the size in bytes of the teachers' hidden states or most probable tokens for the samples of a step."""
    num_tokens = config.batch.prompts_per_step * config.trained_per_prompt * _response_length(config)
    return num_tokens * state_bytes(config, hidden_sizes)


def state_bytes(config: Config, hidden_sizes: Sequence[int]) -> int:
    """Return the size in bytes of the teachers' hidden states or most probable tokens for one response token; 0 with a
    sampled divergence."""
    if not config.compares_distributions:
        return 0
    top_k = config.algorithm.distillation.top_k
    if top_k is None:
        return sum(hidden_sizes) * ITEM_BYTES[config.model.dtype]
    return len(config.teachers.models) * (2 * top_k + 1) * SCORE_BYTES


def num_samples(config: Config) -> int:
    """Return the maximum number of samples that exist at the same time: those of earlier steps whose training may be
    repeated, those started for later steps, and those of the current step or of an evaluation between steps. Samples
    from all dynamic-sampling rounds stay until their step ends."""
    batch, num_earlier = config.batch, num_retained_steps(config)
    if config.is_offline:
        return (1 + num_earlier) * batch.prompts_per_step * config.trained_per_prompt
    per_step = batch.sampling_rounds * batch.prompts_per_step * (batch.samples_per_prompt + config.samples_greedily)
    return num_earlier * per_step + max(per_step, num_evaluated(config)) + num_ahead(config)


def num_evaluated(config: Config) -> int:
    """Return the number of samples in an evaluation. Samples from all sets may exist at the same time, because a set is
    sampled while earlier ones are scored. Sets without a configured size count as empty."""
    return sum((settings.size or 0) * settings.samples_per_prompt for settings in config.evaluation.sets)


def num_retained_steps(config: Config) -> int:
    """Return the maximum number of earlier steps whose samples are kept during a step, because the steps would be
    trained again if a rank were lost. The copy after the latest step may still be in progress, unless the step waits
    for it (rollout.sleep)."""
    if not config.cluster.replace_ranks:
        return 0
    return config.cluster.copy_every_steps - (config.rollout.sleep and not config.is_offline)


def num_ahead(config: Config) -> int:
    """Return the number of samples that are started for later steps and continue during an evaluation."""
    return config.prompts_ahead * (config.batch.samples_per_prompt + config.samples_greedily)


def sample_bytes(config: Config, experts: Experts | None) -> float:
    """Return the size in bytes of one pickled maximum-length sample, including its scores."""
    if config.samples_images:
        denoising = config.rollout.denoising
        num_latents = 1 if config.algorithm.objective.spec.adds_noise else denoising.num_trained + 1
        latents = PIXEL_BYTES * num_latents
        return denoising.height * denoising.width * (latents + RGB_BYTES) + EMBEDDING_BYTES + OBJECT_BYTES
    context, response = config.rollout.context_length, _response_length(config)
    num_scores = _num_scores(config)
    tokens = context * (ID_BYTES + TEXT_BYTES) + response * (LOGPROB_BYTES + FLAG_BYTES + num_scores * SCORE_BYTES)
    if config.rollout.top_k is not None:
        tokens += response * (OFFSET_BYTES + config.rollout.top_k * ID_BYTES)
    if experts is not None and config.actor.experts.replay_routes:
        tokens += context * experts.route_bytes
    retokenized = 0.0
    if config.has_reward_model and config.reward_model.input_format != "ids":
        _, longest = config.context_of(config.reward_model)
        retokenized = longest * (ID_BYTES + TEXT_BYTES + LOGPROB_BYTES + FLAG_BYTES) + OBJECT_BYTES
    return tokens + retokenized + (1 + num_scores) * OBJECT_BYTES


def _response_length(config: Config) -> int:
    """Return the maximum number of tokens in a response."""
    context = config.rollout.context_length
    return context if config.is_offline else min(config.rollout.max_new_tokens, context)


def _num_scores(config: Config) -> int:
    """Return the maximum number of per-token scores that a sample carries."""
    rewards_tokens = config.has_reward_model or any(function.per_turn for function in config.rewards.functions)
    process_rewards = rewards_tokens and config.algorithm.advantage.credits_to_go
    models = (config.has_critic, config.has_implicit_reward, config.has_reward_model, config.kl_in_reward)
    return sum(models) + process_rewards + (len(config.teachers.models) if config.has_teachers else 0)
