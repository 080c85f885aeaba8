"""The canary prompts of a run, and candidate explanations for an engine that samples differently."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from megarl.config.load import load
from megarl.core.prompt import Prompt
from megarl.data.images import ImageProcessor
from megarl.data.prompts import PromptSet
from megarl.step.canaries import IMAGE_SIZES, Canaries, synthetic_images
from tests.paths import BASE
from tests.tiny_model import write_tiny_llama
from tests.tiny_vision import IMAGE_ID, build


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("model"))


def canaries(folder: Path, prompts: list[Prompt], *overrides: str) -> Canaries:
    keys = [f"model.path={folder}", "data.source=d", "rollout.context_length=20", "rollout.max_new_tokens=12"]
    config = load(BASE, [*keys, *overrides])
    return Canaries.of(config, SimpleNamespace(model_folder=folder), PromptSet(tuple(prompts), "hash"))


def test_canaries_are_the_first_rows_of_the_data(folder: Path) -> None:
    rows = [Prompt(str(i), "", [7, 8 + i]) for i in range(6)]
    assert canaries(folder, rows).prompts == rows[:4]
    assert canaries(folder, rows[:2]).prompts == rows[:2]


def test_data_without_prompts_uses_default_texts(folder: Path) -> None:
    found = canaries(folder, [Prompt("environment:0", "", [])]).prompts
    assert found and all(1 <= len(prompt.token_ids) <= 20 - 12 for prompt in found)


def test_vision_canaries_have_images_that_fit_the_context(tmp_path: Path) -> None:
    folder = build(tmp_path, "qwen3_vl")
    keys = [f"model.path={folder}", "model.vision=true", "data.source=d", "rollout.max_new_tokens=12"]
    for longest, count in ((64, len(IMAGE_SIZES)), (20, 0)):
        prompts, files = synthetic_images(load(BASE, [*keys, f"rollout.context_length={longest}"]), folder)
        assert len(prompts) == count
        for prompt in prompts:
            [image] = prompt.images
            assert np.flatnonzero(prompt.token_ids == IMAGE_ID).tolist() == list(range(image.start, image.stop))
            assert len(ImageProcessor.of(folder).patches([files.read(image.digest)])) == np.prod(image.grid)


def test_each_canary_has_two_responses_of_limited_length(folder: Path) -> None:
    asked = canaries(folder, [Prompt("a", "", [7]), Prompt("b", "", [8])])._requests("engine-0")
    assert [request.is_greedy for request in asked] == [True, True, False, False]
    assert {request.max_new_tokens for request in asked} == {12} and {request.purpose for request in asked} == {
        "canaries"
    }
    assert len({request.sample_id for request in asked}) == 4


def test_alternative_sampling_settings_are_tried(folder: Path) -> None:
    rows = [Prompt("a", "", [7])]
    assert canaries(folder, rows)._other_scorings() == {}
    found = canaries(folder, rows, "rollout.temperature=0.5", "rollout.top_k=3")._other_scorings()
    assert {how: (s.temperature, s.truncates) for how, s in found.items()} == {
        "at temperature 1": (1.0, True),
        "at temperature 0.25": (0.25, True),
        "at temperature 2": (2.0, True),
        "over the full vocabulary": (0.5, False),
    }
