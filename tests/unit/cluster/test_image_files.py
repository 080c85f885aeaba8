"""Encoded images in the object store."""

from __future__ import annotations

import asyncio
from collections.abc import Generator
from dataclasses import replace
from pathlib import Path

import pytest
import ray

from megarl.cluster.image_files import attach_images, get_images, get_images_of_turns, put_images
from megarl.cluster.rank_batch import put_samples
from megarl.core.completion import VersionRun
from megarl.core.episode import RolloutInfo
from megarl.core.prompt import Prompt
from megarl.core.prompt_images import PromptImage
from megarl.core.sample import Sample, SampleRef
from megarl.data.image_files import ImageFiles
from megarl.rollout.engine import SamplingRequest
from tests.unit.data.image_data import png


class Ref:
    """A reference that counts how often it is fetched."""

    def __init__(self, file: bytes):
        self.file, self.num_fetched = file, 0

    def __await__(self) -> Generator[None, None, bytes]:
        self.num_fetched += 1
        return self.file
        yield  # makes this function a generator


def request(name: str, refs: list[Ref]) -> SamplingRequest:
    images = tuple(PromptImage(i, 1, (1, 2, 2), ref.file.decode(), ref) for i, ref in enumerate(refs))
    return SamplingRequest(name, Prompt("p", "", [9] * len(refs), images=images), seed=0)


def test_requests_fetch_a_shared_image_once() -> None:
    a, b = Ref(b"a"), Ref(b"b")
    found = asyncio.run(get_images([request("0", [a, b]), request("1", [b, b, a]), request("2", [])]))
    files = [[image.file for image in item.prompt.images] for item in found]
    assert files == [[b"a", b"b"], [b"b", b"b", b"a"], []]
    assert (a.num_fetched, b.num_fetched) == (1, 1)


def test_turns_fetch_a_shared_image_once() -> None:
    a, b = Ref(b"a"), Ref(b"b")
    turns = {
        number: request("0", []).turn([9, 9], 5, 1, images=request("0", refs).prompt.images)
        for number, refs in ((3, [a, b]), (4, [b]), (7, []))
    }
    found = asyncio.run(get_images_of_turns(turns))
    assert {number: [image.file for image in turn.images] for number, turn in found.items()} == {
        3: [b"a", b"b"],
        4: [b"b"],
        7: [],
    }
    assert (a.num_fetched, b.num_fetched) == (1, 1)


def test_samples_of_environments_keep_their_own_images() -> None:
    """An environment may replace or omit the images of the data."""
    prompt = request("0", [Ref(b"a")]).prompt
    plain = SampleRef("1.0.0", "p", 1, 1, 1, "stop", 0, 0)
    assert attach_images(plain, prompt).image_files == (prompt.images[0].file,)
    played = replace(plain, rollout=RolloutInfo("done", 1, 1, {}, 0, 0), image_files=("own",))
    assert attach_images(played, prompt) == played
    assert attach_images(replace(played, image_files=()), prompt).image_files == ()


def test_samples_of_conversations_refer_to_all_their_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal images are stored once, apart from the samples."""
    stored: list[object] = []
    monkeypatch.setattr(ray, "put", lambda value: stored.append(value) or f"ref {len(stored)}")
    files, contents = ImageFiles(), [png(4, 4), png(8, 8)]
    a, b = (PromptImage(i, 1, (1, 2, 2), files.add(file, tmp_path).digest) for i, file in enumerate(contents))
    run = (VersionRun(0, 1),)
    first = Sample("0", Prompt("0", "", [9], images=(a,)), [9], [0.0], [False], run, "stop", "", response_images=(b,))
    second = Sample("1", Prompt("1", "", [9], images=(replace(b, start=0),)), [5], [0.0], [True], run, "stop", "")
    refs = put_samples(put_images([first, second], files))
    assert [ref.image_files for ref in refs] == [("ref 1", "ref 2"), ("ref 2",)]
    assert stored == [*contents, first, second]
