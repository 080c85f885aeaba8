"""Encoded images in Ray's object store, one object per image."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import ray

from megarl.cluster.rank_batch import with_images
from megarl.core.prompt import Prompt
from megarl.core.prompt_images import with_files
from megarl.core.sample import Sample, SampleRef
from megarl.data.image_files import ImageFiles, Pictured
from megarl.environments.images import ImageStore
from megarl.rollout.diffusers.request import ImageRequest
from megarl.rollout.engine import SamplingRequest
from megarl.rollout.turns import Turns

R = TypeVar("R", bound=SamplingRequest | ImageRequest)


def put_images(items: Sequence[Pictured], images: ImageFiles | None) -> list[Pictured]:
    """Put the images of prompts or samples into the object store, and return the items with references to them. Items
    with the same image share its object. `images` is None for data without images."""
    if images is None:
        return list(items)
    digests = dict.fromkeys(image.digest for item in items for image in item.images)
    files = {digest: ray.put(images.read(digest)) for digest in digests}
    return [item.with_files([files[image.digest] for image in item.images]) for item in items]


class RayImages(ImageStore):
    """Stores encoded images in the object store."""

    def put(self, file: bytes) -> ray.ObjectRef:
        return ray.put(file)

    async def get(self, file: ray.ObjectRef) -> bytes:
        return await file


async def get_images(requests: Sequence[R]) -> Sequence[R]:
    """Return the requests with encoded images in place of references to them."""
    files = await _fetch(ref for request in requests for ref in request.prompt.files)
    if not files:
        return requests
    return [
        replace(request, prompt=request.prompt.with_files([files[ref] for ref in request.prompt.files]))
        for request in requests
    ]


async def get_images_of_turns(turns: Turns) -> Turns:
    """Return the turns with encoded images in place of references to them."""
    files = await _fetch(image.file for turn in turns.values() for image in turn.images)
    if not files:
        return turns
    return {
        number: replace(turn, images=with_files(turn.images, [files[image.file] for image in turn.images]))
        for number, turn in turns.items()
    }


async def fetch_images(samples: Sequence[Sample], images: Mapping[str, Sequence[Any]]) -> list[Sample]:
    """Return the samples with their encoded images. `images`: references by sample id; samples without references are
    returned unchanged."""
    files = await _fetch(ref for sample in samples for ref in images.get(sample.id, ()))
    return [with_images(sample, [files[ref] for ref in images.get(sample.id, ())]) for sample in samples]


async def _fetch(refs: Iterable[Any]) -> dict[Any, bytes]:
    """Fetch each object once. Return a mapping from reference to object."""
    unique = list(dict.fromkeys(refs))
    return dict(zip(unique, await asyncio.gather(*unique), strict=True))


def fetch_files(samples: Sequence[Sample]) -> list[Sample]:
    """Return the samples with encoded images in place of references to them."""
    refs = {image.file for sample in samples for image in sample.images if isinstance(image.file, ray.ObjectRef)}
    if not refs:
        return list(samples)
    files = dict(zip(refs, ray.get(list(refs)), strict=True))
    return [sample.with_files([files.get(image.file, image.file) for image in sample.images]) for sample in samples]


def attach_images(sample: SampleRef, prompt: Prompt) -> SampleRef:
    """Attach the prompt's image references to its sample. Environment samples already have theirs."""
    return replace(sample, image_files=prompt.files) if prompt.files and sample.rollout is None else sample
