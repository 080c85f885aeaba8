"""Reward functions in worker processes score samples of an image model."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping

import numpy as np
import pytest

from megarl.config.load import load
from megarl.config.schema import Config, RewardFunction
from megarl.core.completion import VersionRun
from megarl.core.errors import UserError
from megarl.core.latents import Conditioning, LatentSample
from megarl.core.prompt import Prompt
from megarl.core.score import Score
from megarl.environments.batch import is_judged, judge_batch, judge_single
from megarl.environments.trial import try_rewards
from megarl.rewards.pool import FunctionPool
from megarl.rewards.result import Result
from megarl.rewards.scorer import Scorer, require_ratings
from tests.timing import WAIT_S

FUNCTIONS = """
def redness(prompt, response, answer, target, scale=1.0):
    assert response.dtype == "uint8" and response.shape[2] == 3 and (prompt, answer) == ("a red square", "red")
    response[:] = response // 2  # a function may write into its own copy
    return float(response[..., 0].mean()) * scale - target

def contrast(prompts, responses, answers, *, row):
    assert [item["target"] for item in row] == [1.0] * len(responses)
    return [float(image.std()) for image in responses]

def dark(prompt, response, answer):
    assert response.mean() > 100, "the image is dark"
    return True

def picture(prompts, responses, answers):
    return [image if image.mean() > 100 else 0.5 for image in responses]
"""
SIZES = ((4, 6), (9, 5))
PROMPT = Prompt("7", "a red square", (), "red", columns={"target": 1.0})
IMAGES = [np.random.default_rng(seed).integers(0, 256, (*size, 3), np.uint8) for seed, size in enumerate(SIZES)]
IMAGES.append(np.full((4, 6, 3), 10, np.uint8))


@pytest.fixture(scope="module")
def functions(tmp_path_factory: pytest.TempPathFactory) -> list[RewardFunction]:
    file = tmp_path_factory.mktemp("functions") / "images.py"
    file.write_text(FUNCTIONS)
    options = {"redness": {"scale": 2.0}}
    weights = {"redness": 0.5, "contrast": -2.0, "dark": 1.0, "picture": 1.0}
    return [
        RewardFunction(function=f"{file}:{name}", weight=weight, options=options.get(name, {}))
        for name, weight in weights.items()
    ]


@pytest.fixture(scope="module")
def pool(functions: list[RewardFunction]) -> Iterator[FunctionPool]:
    pool = FunctionPool(functions, None, 2, WAIT_S)
    yield pool
    pool.close()


def sample(number: int) -> LatentSample:
    latents = np.zeros((2, 1, 2, 2), np.float32)
    versions = (VersionRun(0, 2),)
    return LatentSample(
        *(f"0.0.{number}", PROMPT, np.array([1.0, 0.5, 0.0]), [0], latents, [-1.0], versions),
        *(Conditioning(np.zeros((1, 2))), None, 64),
        image=IMAGES[number],
    )


def scores(pool: FunctionPool, functions: list[RewardFunction], names: set[str]) -> list[Score]:
    """Score all samples as the reward process does, with the functions that have these names."""
    samples = [sample(number) for number in range(len(IMAGES))]
    chosen = [entry for entry in functions if entry.label in names]
    single = [entry.label for entry in chosen if entry.label not in pool.batch_functions]

    async def judge() -> list[Mapping[str, Result]]:
        batch = await judge_batch(pool, samples)
        return [
            {**(await judge_single(pool, single, item)), **{name: found[name] for name in names & found.keys()}}
            for item, found in zip(samples, batch, strict=True)
        ]

    assert all(map(is_judged, samples))
    scorer = Scorer(chosen)
    scored = [scorer.score(item, results) for item, results in zip(samples, asyncio.run(judge()), strict=True)]
    assert all(by_token is None for _, by_token in scored)
    return require_ratings([score for score, _ in scored])


def test_images_are_scored_by_weighted_functions(pool, functions):
    found = scores(pool, functions, {"redness", "contrast"})
    redness = [2 * float((image // 2)[..., 0].mean()) - 1 for image in IMAGES]
    contrast = [float(image.std()) for image in IMAGES]
    assert [score.parts for score in found] == [
        {"redness": first, "contrast": second} for first, second in zip(redness, contrast, strict=True)
    ]
    assert [score.value for score in found] == pytest.approx(
        [0.5 * first - 2 * second for first, second in zip(redness, contrast, strict=True)]
    )


def test_function_that_raises_fails_only_its_image(pool, functions):
    found = scores(pool, functions, {"redness", "dark"})
    assert [score.value is None for score in found] == [False, False, True]
    expected = "rewards.functions: dark raised AssertionError: the image is dark on sample 0.0.2"
    assert found[2].failure == expected and found[2].parts.keys() == {"redness"}


def test_image_in_place_of_a_score_fails_the_sample(pool, functions):
    found = scores(pool, functions, {"picture"})
    assert [score.value for score in found] == [None, None, 0.5]
    expected = "rewards.functions: picture returned ndarray instead of a finite number or a bool on sample 0.0.0"
    assert found[0].failure == expected


def test_rewards_are_tried_on_images(pool, functions, tmp_path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        "base: base.yaml\nrun: {name: images, steps: 1}\nmodel: {path: model}\ndata: {source: arithmetic}\n"
        "rollout: {engine: diffusers, denoising: {height: 8, width: 24}}\n"
    )

    def config(*names: str) -> Config:
        chosen = ", ".join(f"{{function: '{entry.function}'}}" for entry in functions if entry.label in names)
        return load(recipe, [f"rewards.functions=[{chosen}]"])

    with pytest.raises(UserError, match=r"picture returned ndarray .* \(megarl used a gray image in this trial\)"):
        try_rewards(config("dark", "picture"), pool, [PROMPT])
    only_redness = FunctionPool(config("redness").rewards.functions, None, 1, WAIT_S)
    try:
        assert try_rewards(config("redness"), only_redness, [PROMPT]) == {"redness": 63.0}
    finally:
        only_redness.close()
