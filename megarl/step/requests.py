"""The sampling requests in a step."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from megarl.config.schema import Config
from megarl.core.prompt import Prompt
from megarl.data.prompts import GivenResponse
from megarl.rollout.diffusers.request import Denoising, ImageRequest
from megarl.rollout.engine import SamplingRequest


def requests(
    config: Config,
    number: int,
    prompts: Sequence[Prompt],
    places: Sequence[int] | None = None,
    responses: Mapping[str, GivenResponse] = MappingProxyType({}),
) -> list[list[SamplingRequest]] | list[list[ImageRequest]]:
    """Return samples_per_prompt requests for each prompt, plus one for a greedy response if the estimator needs it.
    Seeds are derived from run.seed and the sample's position in the run.

    Args:
        places: the prompts' positions in the step; by default, they count from 0.
        responses: given responses by prompt id, for rollout.prefix_share.
    """
    numbered = list(zip(range(len(prompts)) if places is None else places, prompts, strict=True))
    if config.samples_images:
        return [
            [_trained_image_request(config, number, i, k, prompt) for k in range(config.batch.samples_per_prompt)]
            for i, prompt in numbered
        ]
    groups = []
    for i, prompt in numbered:
        prefix = _prefix(config, number, i, responses[prompt.id]) if config.rollout.prefix_share else ()
        request = SamplingRequest(
            "",
            prompt,
            seed=0,
            group_seed=_sampling_seed(config.run.seed, number, i),
            prefix=prefix,
            max_new_tokens=config.rollout.max_new_tokens - len(prefix) if prefix else None,
        )
        numbers = range(config.batch.samples_per_prompt)
        seeds = [_sampling_seed(config.run.seed, number, i, k) for k in numbers]
        groups.append([replace(request, sample_id=f"{number}.{i}.{k}", seed=seeds[k]) for k in numbers])
    if config.samples_greedily:
        for (i, _), group in zip(numbered, groups, strict=True):
            group.append(replace(group[0], sample_id=f"{number}.{i}.greedy", seed=0, greedy=True))
    return groups


def _prefix(config: Config, number: int, i: int, response: GivenResponse) -> tuple[int, ...]:
    """Return the first tokens of all responses to a step's prompt i. They leave at least one token to sample, and the
    next token is the assistant's: the policy must not continue a user's message or a tool's result."""
    num_tokens = len(response.token_ids)
    longest = min(int(config.rollout.prefix_share * num_tokens), num_tokens - 1)
    lengths = [n for n in range(longest + 1) if n == 0 or response.mask[n]]
    length = random.Random(f"{config.run.seed}.prefix.{number}.{i}").choice(lengths)
    return tuple(response.token_ids[:length].tolist())


def _trained_image_request(config: Config, number: int, i: int, k: int, prompt: Prompt) -> ImageRequest:
    """Return the request for image k of a step's prompt i, with the denoising steps that are trained."""
    denoising, seed, sample_id = config.rollout.denoising, config.run.seed, f"{number}.{i}.{k}"
    sampling_seed = _sampling_seed(seed, number, i, k)
    if not config.algorithm.objective.spec.adds_noise:
        return image_request(config, sample_id, prompt, sampling_seed, denoising.sde_window(seed, number))
    request = image_request(config, sample_id, prompt, sampling_seed, range(0))
    return replace(request, noised_steps=tuple(denoising.noised_steps(seed, sample_id)), returns_final=True)


def image_request(config: Config, sample_id: str, prompt: Prompt, seed: int, sde_steps: range) -> ImageRequest:
    """Return the request for an image. `sde_steps`: see Denoising; an empty range samples with the ODE only."""
    keys = config.rollout.denoising
    denoising = Denoising(
        height=keys.height,
        width=keys.width,
        num_steps=keys.num_steps,
        shift=keys.shift,
        guidance=keys.guidance,
        kind=keys.kind,
        noise_level=keys.noise_level,
        reduction=keys.logprob,
        sde_steps=sde_steps,
    )
    return ImageRequest(sample_id=sample_id, prompt=prompt, seed=seed, denoising=denoising, returns_image=True)


def _sampling_seed(*place: int) -> int:
    return random.Random(repr(place)).getrandbits(31)
