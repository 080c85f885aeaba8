"""Encoded images of prompts in Ray's object store, one object per image."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypeVar

import ray

from megarl.core.prompt import Prompt
from megarl.core.sample import SampleRef
from megarl.data.image_files import ImageFiles
from megarl.rollout.diffusers.request import ImageRequest
from megarl.rollout.engine import SamplingRequest

R = TypeVar("R", bound=SamplingRequest | ImageRequest)


def put_images(prompts: Sequence[Prompt], images: ImageFiles | None) -> list[Prompt]:
    """Put the prompts' images into the object store, and return the prompts with references to them. Prompts with the
    same image share its object. `images` is None for prompts without images."""
    if images is None:
        return list(prompts)
    digests = dict.fromkeys(image.digest for prompt in prompts for image in prompt.images)
    files = {digest: ray.put(images.read(digest)) for digest in digests}
    return [prompt.with_files([files[image.digest] for image in prompt.images]) for prompt in prompts]


async def get_images(requests: Sequence[R]) -> Sequence[R]:
    """Fetch the images that the requests refer to, and return the requests with the encoded images."""
    refs = list(dict.fromkeys(image.file for request in requests for image in request.prompt.images))
    if not refs:
        return requests
    files = dict(zip(refs, await asyncio.gather(*refs), strict=True))
    return [
        replace(request, prompt=request.prompt.with_files([files[image.file] for image in request.prompt.images]))
        for request in requests
    ]


def attach_images(sample: SampleRef, prompt: Prompt) -> SampleRef:
    """Copy the prompt's image references to its sample."""
    files: tuple[Any, ...] = tuple(image.file for image in prompt.images)
    return replace(sample, prompt_images=files) if files else sample
