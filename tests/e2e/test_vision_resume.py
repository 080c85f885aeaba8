"""Runs with images of environments that are killed and resumed, or lose an engine, equal an uninterrupted one bit for
bit."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from safetensors.torch import load_file

from megarl.rewards.sample_file import load_samples
from tests.e2e.run import Run
from tests.e2e.test_resume import kill, latest, metrics
from tests.e2e.test_vision_train import IMAGES, screens, write_recipe
from tests.timing import START_S

pytestmark = [pytest.mark.slow, pytest.mark.exhaustive, pytest.mark.one_part]
STEPS = 3
HELD = """
import asyncio
from dataclasses import replace
from pathlib import Path

HOLD = Path(__file__).with_name("hold")

class Held(Screens):
    def reset(self, task):
        self.row = task.id
        return super().reset(task)

    async def step(self, turn):
        while self._is_held():
            HOLD.with_name("held").touch()
            await asyncio.sleep(0.02)
        return replace(super().step(turn), reward=sum(turn.token_ids) % 7 / 7)

    def _is_held(self):
        try:
            return self.row.endswith(HOLD.read_text())
        except FileNotFoundError:
            return False
"""
"""While the file `hold` exists, the environment blocks for the rows whose ids end with its content."""


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_recipe(tmp_path_factory.mktemp("recipe"))


@pytest.fixture(scope="module")
def keys(recipe: Path) -> list[str]:
    """The keys of all runs. Fake engines sample the same turns in any batch."""
    checkpoints = "checkpoint={every_steps: 1, background: false}"
    return [
        *screens(recipe.parent, HELD, "Held"),
        *(f"run.steps={STEPS}", checkpoints, "actor.layout={pp: 2}", "rollout.replicas=2", "resume=auto"),
    ]


@pytest.fixture(scope="module")
def uninterrupted(recipe: Path, keys: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    with Run(recipe, tmp_path_factory.mktemp("uninterrupted"), *keys) as run:
        assert run.end(START_S) == 0, run.errors
    before, after = (
        load_file(folder / "model.safetensors") for folder in (recipe.parent / "model", run.folder / "model")
    )
    tower = [name for name in before if name.startswith("model.visual.")]
    assert tower and not any(before[name].equal(after[name]) for name in tower), "the run trains the vision tower"
    return run.folder


@pytest.fixture
def hold(recipe: Path) -> Iterator[Path]:
    file = recipe.with_name("hold")
    yield file
    file.unlink(missing_ok=True)


def wait_until_held(run: Run, hold: Path, rows: str) -> None:
    """Hold rollouts after the first step, and wait until one of them is blocked."""
    held = hold.with_name("held")
    held.unlink(missing_ok=True)
    run.wait_for_step(1)
    hold.write_text(rows)
    run.wait_until(held.exists)


def assert_equal(run: Path, expected: Path) -> None:
    """Check that both runs have the same samples and trained model, bit for bit."""
    files = sorted(expected.glob("rollouts/*.jsonl"))
    assert len(files) == STEPS
    for file in files:
        assert (run / "rollouts" / file.name).read_text() == file.read_text()
    [weights] = expected.glob("model/*.safetensors")
    assert (run / "model" / weights.name).read_bytes() == weights.read_bytes()


def test_killed_run_uses_the_images_of_finished_groups(
    recipe: Path, keys: list[str], uninterrupted: Path, hold: Path, tmp_path: Path
) -> None:
    """The run is killed when all groups of a step but one have finished."""
    num_finished = len(IMAGES) - 1
    with Run(recipe, tmp_path, *keys) as run:
        wait_until_held(run, hold, ":1")
        folder = run.folder / "finished_rollouts" / f"after_{latest(tmp_path):06d}"
        run.wait_until(lambda: len(list(folder.glob("[0-9]*.safetensors"))) == num_finished)
        kill(run)
    groups = [group for file in folder.glob("[0-9]*.safetensors") for group in load_samples(file)]
    images = [image for _, _, samples in groups for sample in samples for image in sample.response_images]
    assert len(images) == 2 * 4 * num_finished, "each rollout has two observations with an image"
    assert all(hashlib.sha256(image.file).hexdigest() == image.digest for image in images)
    hold.unlink()
    with Run(recipe, tmp_path, *keys) as run:
        assert run.end(START_S) == 0, run.errors
    assert f"{num_finished} prompts have finished rollouts" in run.output
    assert_equal(run.folder, uninterrupted)
    assert metrics(run.folder) == metrics(uninterrupted)


def test_engine_lost_during_rollouts_does_not_change_a_run(
    recipe: Path, keys: list[str], uninterrupted: Path, hold: Path, tmp_path: Path
) -> None:
    """The lost engine's rollouts start again on the other engine."""
    with Run(recipe, tmp_path, *keys) as run:
        wait_until_held(run, hold, "")
        run.named("engine-0").kill()
        hold.unlink()
        assert run.end(START_S) == 0, run.errors
    assert "engine-0 died and is being restarted" in run.output
    assert_equal(run.folder, uninterrupted)
