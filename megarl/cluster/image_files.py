"""Encoded images of prompts in Ray's object store, one object per image."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import ray

from megarl.core.prompt import Prompt
from megarl.core.sample import SampleRef
from megarl.rollout.diffusers.request import ImageRequest
from megarl.rollout.engine import SamplingRequest

R = TypeVar("R", bound=SamplingRequest | ImageRequest)


def put_images(prompts: Sequence[Prompt], read: Callable[[str], bytes]) -> list[Prompt]:
    """Return the prompts with references to their images, which the object store keeps while a reference exists.
    Prompts with the same image share its object. `read` returns an encoded image, given its digest."""
    digests = dict.fromkeys(image.digest for prompt in prompts for image in prompt.images)
    files = {digest: ray.put(read(digest)) for digest in digests}
    return [prompt.with_files([files[image.digest] for image in prompt.images]) for prompt in prompts]


async def get_images(requests: Sequence[R]) -> Sequence[R]:
    """Return the requests with the encoded images in place of the references."""
    refs = list(dict.fromkeys(image.file for request in requests for image in request.prompt.images))
    if not refs:
        return requests
    files = dict(zip(refs, await asyncio.gather(*refs), strict=True))
    return [
        replace(request, prompt=request.prompt.with_files([files[image.file] for image in request.prompt.images]))
        for request in requests
    ]


def attach_images(samples: Sequence[SampleRef], prompt: Prompt) -> list[SampleRef]:
    """Return the samples of a prompt with the references that it has to its images."""
    files: tuple[Any, ...] = tuple(image.file for image in prompt.images)
    return [replace(sample, prompt_images=files) for sample in samples] if files else list(samples)
