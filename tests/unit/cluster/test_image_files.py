"""Encoded images in the object store."""

from __future__ import annotations

import asyncio
from collections.abc import Generator

from megarl.cluster.image_files import get_images
from megarl.core.prompt import Prompt
from megarl.core.prompt_images import PromptImage
from megarl.rollout.engine import SamplingRequest


class Ref:
    """A reference that counts how often it is fetched."""

    def __init__(self, file: bytes):
        self.file, self.num_fetched = file, 0

    def __await__(self) -> Generator[None, None, bytes]:
        self.num_fetched += 1
        return self.file
        yield


def request(name: str, refs: list[Ref]) -> SamplingRequest:
    images = tuple(PromptImage(i, 1, (1, 2, 2), ref.file.decode(), ref) for i, ref in enumerate(refs))
    return SamplingRequest(name, Prompt("p", "", [9] * len(refs), images=images), seed=0)


def test_requests_fetch_a_shared_image_once() -> None:
    a, b = Ref(b"a"), Ref(b"b")
    found = asyncio.run(get_images([request("0", [a, b]), request("1", [b, b, a]), request("2", [])]))
    files = [[image.file for image in item.prompt.images] for item in found]
    assert files == [[b"a", b"b"], [b"b", b"b", b"a"], []]
    assert (a.num_fetched, b.num_fetched) == (1, 1)
