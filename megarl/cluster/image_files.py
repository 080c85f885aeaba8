"""Encoded images of prompts in Ray's object store, one object per image."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import ray

from megarl.cluster.rank_batch import with_images
from megarl.core.prompt import Prompt
from megarl.core.sample import Sample, SampleRef
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
    files = await _fetch(ref for request in requests for ref in request.prompt.files)
    if not files:
        return requests
    return [
        replace(request, prompt=request.prompt.with_files([files[ref] for ref in request.prompt.files]))
        for request in requests
    ]


async def fetch_images(samples: Sequence[Sample], images: Mapping[str, Sequence[Any]]) -> list[Sample]:
    """Return the samples with the encoded images of their prompts. `images`: references by sample id; samples without
    references are returned unchanged."""
    files = await _fetch(ref for sample in samples for ref in images.get(sample.id, ()))
    return [with_images(sample, [files[ref] for ref in images.get(sample.id, ())]) for sample in samples]


async def _fetch(refs: Iterable[Any]) -> dict[Any, bytes]:
    """Fetch each object once. Return a mapping from reference to object."""
    unique = list(dict.fromkeys(refs))
    return dict(zip(unique, await asyncio.gather(*unique), strict=True))


def attach_images(sample: SampleRef, prompt: Prompt) -> SampleRef:
    """Copy the prompt's image references to its sample."""
    return replace(sample, prompt_images=prompt.files) if prompt.files else sample
