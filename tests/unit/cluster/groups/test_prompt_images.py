"""Prompt images from the engines to the reward functions."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megarl.cluster.groups import engine_actor, rewards
from megarl.cluster.groups.engine_actor import EngineActor
from megarl.cluster.groups.rewards import RewardWorker
from megarl.config.load import load
from megarl.core.completion import VersionRun
from megarl.core.prompt import Prompt
from megarl.core.prompt_images import PromptImage
from megarl.core.sample import Sample
from megarl.models.run_models import ModelFolders
from megarl.rollout.engine import SamplingRequest
from tests.paths import QUICKSTART
from tests.timing import WAIT_S
from tests.unit.cluster.test_image_files import Ref
from tests.unit.data.image_data import png

FUNCTIONS = """
def single(prompt, response, answer, prompt_images):
    with open(__file__ + ".calls", "a") as file:
        file.write(response + "\\n")
    return sum(image.width for image in prompt_images)

def batch(prompts, responses, answers, prompt_images):
    return [sum(image.height for image in images) for images in prompt_images]
"""


def sample(name: str, refs: Sequence[Ref]) -> Sample:
    images = tuple(PromptImage(i, 1, (1, 2, 2), str(i)) for i in range(len(refs)))
    prompt = Prompt(f"prompt {name[0]}", "?", [5] * (1 + len(refs)), images=images)
    return Sample(name, prompt, [7], [-1.0], [True], (VersionRun(0, 1),), "stop", name)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    file = tmp_path / "functions.py"
    file.write_text(FUNCTIONS)
    return file


@pytest.fixture
def worker(file: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RewardWorker]:
    monkeypatch.setattr(rewards.ray, "get", lambda refs: refs)
    functions = [{"function": f"{file}:single"}, {"function": f"{file}:batch", "weight": 100.0}]
    keys = [
        f"rewards.functions={json.dumps(functions)}",
        "evaluation.sets=[{name: set}]",
        f"rewards.timeout_s={WAIT_S}",
        "run.token_samples=0",
    ]
    worker = RewardWorker(load(QUICKSTART, keys), ModelFolders(Path(), None, None, None), num_processes=1)
    # Thumbnails are tested elsewhere.
    worker._append = worker._evaluation["set"]._append = lambda *_: None
    yield worker
    worker.close()


def calls(file: Path) -> list[str]:
    found = Path(f"{file}.calls")
    return found.read_text().split() if found.exists() else []


def test_images_are_scored_in_steps_and_evaluations(worker: RewardWorker, tmp_path: Path) -> None:
    wide, high = Ref(png(30, 2)), Ref(png(4, 5, seed=1))
    refs = {"0.0.0": [wide, high], "0.0.1": [wide, high], "1.0.0": [high], "2.0.0": []}
    samples = [sample(name, found) for name, found in refs.items()]
    images = {name: found for name, found in refs.items() if found}

    async def step() -> list[list[float | None]]:
        scored, _ = await worker.score(samples, {}, 1, tmp_path / "rollouts.jsonl", images)
        evaluated = await worker.evaluate(samples, "set", 1, tmp_path / "set.jsonl", images)
        return [[score.value for score in scores] for scores in (scored, evaluated)]

    assert asyncio.run(step()) == [[734, 734, 504, 0]] * 2


def test_images_are_scored_during_rollout(worker: RewardWorker, file: Path, tmp_path: Path) -> None:
    """Samples that arrive without images are scored when the driver sends references to the images."""
    refs = [Ref(png(30, 2))]
    samples = [sample(name, refs) for name in ("0.0.0", "0.0.1")]

    async def step() -> list[float | None]:
        worker.receive(samples[:1], {"0.0.0": refs})
        worker.receive(samples[1:])
        assert worker._begun.keys() == {"0.0.0"}
        await worker._begun["0.0.0"][1]
        assert calls(file) == ["0.0.0"]
        images = {item.id: refs for item in samples}
        scores, _ = await worker.score(samples, {}, 1, tmp_path / "rollouts.jsonl", images)
        return [score.value for score in scores]

    assert asyncio.run(step()) == [230, 230]
    assert calls(file) == ["0.0.0", "0.0.1"]


def test_engines_report_references_to_images(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_actor, "own_scratch", lambda: None)
    monkeypatch.setattr(engine_actor.segments, "note", lambda _: None)
    ref, heard = Ref(b"file"), []
    prompts = [Prompt("a", "?", [5], images=(PromptImage(0, 1, (1, 2, 2), "0", ref),)), Prompt("b", "?", [5])]
    requests = [SamplingRequest(f"{prompt.id}.0", prompt, seed=0) for prompt in prompts]

    async def generate(fetched: Sequence[SamplingRequest], report: Any) -> list[Sample]:
        assert [item.prompt.files for item in fetched] == [(b"file",), ()]
        samples = [replace(sample(f"{item.prompt.id}.0", ()), prompt=item.prompt) for item in requests]
        report(samples)
        return samples

    actor_class = EngineActor.__ray_metadata__.modified_class
    actor = type("Actor", (actor_class,), {"__init__": lambda _: None})()
    actor._worker, actor._generating = SimpleNamespace(generate=generate), {}
    listener = SimpleNamespace(begin=SimpleNamespace(remote=lambda *arguments: heard.append(arguments)))
    asyncio.run(actor.generate(requests, listener))
    [(samples, images)] = heard
    assert [item.id for item in samples] == ["a.0", "b.0"] and images == {"a.0": (ref,)}
