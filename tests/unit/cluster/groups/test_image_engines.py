"""The parts of an image sample: reward processes receive the image without latents, and trainers the latents."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import ray

from megarl.cluster import rank_batch
from megarl.cluster.groups import engine_actor
from megarl.cluster.groups.engine_actor import ImageEngineActor
from megarl.cluster.groups.engines import ImageEngineGroup
from megarl.cluster.groups.rewards import RewardGroup
from megarl.cluster.pending import Answers, ready
from megarl.cluster.rank_batch import get_samples, put_sample
from megarl.core.completion import VersionRun
from megarl.core.latents import Conditioning, LatentSample
from megarl.core.prompt import Prompt
from megarl.core.sample import SampleRef
from megarl.rewards.sample_file import load_samples, save_samples
from megarl.rollout.router import Aborted

STEPS, CHANNELS, SIDE, SCALE, CAPTION, POOLED = 3, 16, 16, 8, (40, 2560), 2048


def sample(number: int) -> LatentSample:
    """Return a sample of 128 x 128 pixels with Z-Image's channels."""
    random = np.random.default_rng(number)
    return LatentSample(
        id=f"1.0.{number}",
        prompt=Prompt("7", "a cat", ()),
        sigmas=np.linspace(1, 0, 11),
        steps=range(STEPS),
        latents=random.standard_normal((STEPS + 1, CHANNELS, SIDE, SIDE), np.float32),
        logprobs=[-1.0] * STEPS,
        versions=(VersionRun(4, 10),),
        embedding=Conditioning(random.standard_normal(CAPTION, np.float32), random.standard_normal(POOLED, np.float32)),
        empty_embedding=Conditioning(
            random.standard_normal((8, CAPTION[1]), np.float32), random.standard_normal(POOLED, np.float32)
        ),
        num_tokens=256,
        image=random.integers(0, 256, (SIDE * SCALE, SIDE * SCALE, 3), np.uint8),
    )


SAMPLES = [sample(number) for number in range(2)]
REQUESTS = [SimpleNamespace(sample_id=item.id, prompt=item.prompt) for item in SAMPLES]


@pytest.fixture
def actor(monkeypatch: pytest.MonkeyPatch) -> Any:
    """An engine actor that reports its two samples one by one."""
    monkeypatch.setattr(engine_actor, "own_scratch", lambda: None)
    monkeypatch.setattr(engine_actor.segments, "note", lambda _: None)

    async def generate(_: Any, report: Callable[[list[LatentSample]], object]) -> list[LatentSample]:
        for item in SAMPLES:
            report([item])
        return SAMPLES

    actor_class = ImageEngineActor.__ray_metadata__.modified_class
    actor = type("Actor", (actor_class,), {"__init__": lambda _: None})()
    actor._worker, actor._generating = SimpleNamespace(generate=generate), {}
    return actor


def size(value: Any) -> int:
    return len(pickle.dumps(value))


def test_reward_processes_receive_only_images(actor):
    """Pixels have a byte per channel, latents and embeddings four bytes per element."""
    heard: list[LatentSample] = []
    listener = SimpleNamespace(begin=SimpleNamespace(remote=lambda samples, _: heard.extend(samples)))
    timed, *parts = asyncio.run(actor.generate(REQUESTS, listener))
    assert timed.value == [SampleRef.of(item) for item in SAMPLES]
    for item, trained, scored in zip(SAMPLES, parts[0::2], parts[1::2], strict=True):
        assert (
            np.array_equal(scored.response, item.image) and not scored.latents.size and not scored.embedding.tokens.size
        )
        assert (scored.prompt, scored.versions, scored.id) == (item.prompt, item.versions, item.id)
        assert np.array_equal(scored.logprobs, item.logprobs) and np.array_equal(scored.steps, item.steps)
        assert trained.image is None and np.array_equal(trained.latents, item.latents)
        assert trained.empty_embedding == item.empty_embedding
    assert heard == parts[1::2]
    pixels = 3 * (SIDE * SCALE) ** 2
    floats = 4 * ((STEPS + 1) * CHANNELS * SIDE**2 + (CAPTION[0] + 8) * CAPTION[1] + 2 * POOLED)
    metadata = 2000
    assert pixels + floats < size(SAMPLES[0]) < pixels + floats + metadata
    assert pixels < size(heard[0]) < pixels + metadata
    assert floats < size(parts[0]) < floats + metadata


def test_aborted_call_returns_nothing_for_each_part(actor):
    async def generate(_requests: Any, _report: Any) -> list[LatentSample]:
        raise asyncio.CancelledError

    actor._worker.generate = generate
    timed, *parts = asyncio.run(actor.generate(REQUESTS, None))
    assert timed.value == Aborted(0) and parts == [None] * 4


def test_references_lead_to_the_parts():
    """Reward processes read one reference, and ranks the other."""
    outputs = ["infos", "trained 0", "scored 0", "trained 1", "scored 1"]
    given = []
    generate = SimpleNamespace(
        options=lambda num_returns: SimpleNamespace(remote=lambda *_: given.append(num_returns) or outputs)
    )
    group = SimpleNamespace(
        _actors={"engine-0": SimpleNamespace(generate=generate)},
        sample_fields=ImageEngineGroup.sample_fields,
        _submit=lambda *_: ready(Answers({"engine-0": [SampleRef.of(item) for item in SAMPLES]}, set())),
    )
    found = ImageEngineGroup._sample(group, None, {"engine-0": REQUESTS}).result()["engine-0"]
    assert given == [5]
    refs = [ref for [ref] in found]
    assert [ref.sample for ref in refs] == ["trained 0", "trained 1"]
    asked: list[list[str]] = []
    rewards = SimpleNamespace(
        _model=None,
        _score=SimpleNamespace(on_first=lambda scored, *_: asked.append(scored)),
        _evaluate=SimpleNamespace(on_first=lambda scored, *_: asked.append(scored)),
    )
    RewardGroup.score(rewards, refs, 1, Path("rollouts"))
    RewardGroup.evaluate(rewards, refs, "set", 1, Path("rollouts"))
    assert asked == [["scored 0", "scored 1"]] * 2


def test_images_that_wait_are_restored_from_a_checkpoint(monkeypatch, tmp_path):
    """The parts are joined in the file and separated again."""
    objects: dict[str, LatentSample] = {}

    def put(part: LatentSample) -> str:
        objects[f"object {len(objects)}"] = part
        return f"object {len(objects) - 1}"

    monkeypatch.setattr(ray, "put", put)
    monkeypatch.setattr(rank_batch, "_get", lambda refs: {ref: objects[ref] for ref in refs})
    refs = [put_sample(item) for item in SAMPLES]
    assert get_samples(refs) == SAMPLES
    save_samples([(3, 1, get_samples(refs))], tmp_path / "waiting")
    [(row, version, restored)] = load_samples(tmp_path / "waiting")
    assert (row, version, restored) == (3, 1, SAMPLES)
    again = put_sample(restored[0])
    assert objects[again.sample] == SAMPLES[0].for_training and objects[again.scored] == SAMPLES[0].for_rewards
