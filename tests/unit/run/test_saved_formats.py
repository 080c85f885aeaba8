"""Checkpoints that an earlier megarl saved. Those in the folder `saved` are as it wrote them: they are not changed."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

import pytest

from megarl.config.saved import ADDED, complete
from megarl.config.schema import Config
from megarl.core.checkpoint import FORMAT, MANIFEST, Checkpoint
from megarl.run.checkpoints import Checkpoints
from tests.unit.run.test_resume import PROMPTS, config, start

SAVED = sorted((Path(__file__).parent / "saved").iterdir())
FIRST_ADDED = ("actor.optimizer.nonfinite_limit", "rewards.judge_order", "rewards.processes", "rewards.timeout_s")


def put(saved: Path, root: Path) -> Path:
    """Makes it the newest checkpoint of the run root/a."""
    checkpoint = root / "a" / "checkpoints" / "step_000002"
    shutil.copytree(saved, checkpoint)
    Checkpoints(checkpoint.parent).point_to(checkpoint)
    return checkpoint


def rewrite(checkpoint: Path, change) -> None:
    content = json.loads((checkpoint / MANIFEST).read_text())["content"]
    change(content)
    digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    (checkpoint / MANIFEST).write_text(json.dumps({"sha256": digest, "content": content}))


def remove_keys(content: dict) -> None:
    for key in FIRST_ADDED:
        *sections, name = key.split(".")
        section = content["state"]["config"]
        for part in sections:
            section = section[part]
        del section[name]


@pytest.mark.parametrize("saved", SAVED, ids=lambda path: path.name)
def test_every_format_goes_on(saved: Path, tmp_path: Path) -> None:
    """A key that fails here is in none of the saved ones: it goes into megarl.config.saved.ADDED with a new format."""
    checkpoint = Checkpoint.open(put(saved, tmp_path))
    assert f"format_{checkpoint.format}" == saved.name
    Config.model_validate(complete(checkpoint.state["config"], checkpoint.format))
    resume_point = start(config(tmp_path, "resume=auto"), PROMPTS)
    assert (resume_point.state.step, resume_point.checkpoint) == (2, checkpoint)


def test_a_checkpoint_without_the_keys_that_came_since_goes_on(tmp_path: Path) -> None:
    rewrite(put(SAVED[0], tmp_path), remove_keys)
    assert start(config(tmp_path, "resume=auto"), PROMPTS).state.step == 2


def test_a_key_that_came_since_has_the_value_of_the_runs_before_it(tmp_path: Path) -> None:
    rewrite(put(SAVED[0], tmp_path), remove_keys)
    with pytest.raises(ValueError, match=r"^rewards.judge_order=seeded: .* was saved with both. Fix: restore it"):
        start(config(tmp_path, "resume=auto", "rewards.judge_order=seeded"), PROMPTS)


def test_the_format_is_saved_and_a_later_one_refused(tmp_path: Path) -> None:
    checkpoint = put(SAVED[0], tmp_path)
    rewrite(checkpoint, lambda content: content.update(format=FORMAT + 1))
    with pytest.raises(
        ValueError, match=rf"saved in format {FORMAT + 1} by a later version of megarl; .* up to {FORMAT}. Fix: update"
    ):
        start(config(tmp_path, "resume=auto"), PROMPTS)


def test_every_format_has_its_keys() -> None:
    assert sorted(ADDED) == list(range(2, FORMAT + 1))
    assert SAVED
