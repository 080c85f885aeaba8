"""Checkpoints of every format. The folders in `saved` are not changed after their format is released."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from megarl.config import saved as saved_config
from megarl.config.saved import ADDED, REMOVED, complete
from megarl.config.schema import Config
from megarl.core.checkpoint import FORMAT, FORMAT_KEY, MANIFEST, Checkpoint, checked_format
from megarl.core.errors import UserError
from megarl.run.checkpoints import Checkpoints
from tests.unit.run.saved_format import SAVED, write
from tests.unit.run.test_resume import PROMPTS, config, start

FOLDERS = sorted(SAVED.iterdir())


def put(folder: Path, root: Path) -> Path:
    """Make a saved checkpoint the newest one of the run root/a."""
    checkpoint = root / "a" / "checkpoints" / "step_000002"
    shutil.copytree(folder, checkpoint)
    Checkpoints(checkpoint.parent).point_to(checkpoint)
    return checkpoint


def rewrite(checkpoint: Path, change) -> None:
    content = json.loads((checkpoint / MANIFEST).read_text())["content"]
    change(content)
    digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    (checkpoint / MANIFEST).write_text(json.dumps({"sha256": digest, "content": content}))


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda path: path.name)
def test_every_format_is_resumed(folder: Path, tmp_path: Path) -> None:
    """If a key fails here, add it to megarl.config.saved.ADDED or REMOVED with a new format."""
    checkpoint = Checkpoint.open(put(folder, tmp_path))
    assert f"format_{checkpoint.format}" == folder.name
    Config.model_validate(complete(checkpoint.state["config"], checkpoint.format))
    resume_point = start(config(tmp_path, "resume=auto"), PROMPTS)
    assert (resume_point.state.step, resume_point.checkpoint) == (2, checkpoint)


def test_every_format_has_a_folder_and_its_keys(tmp_path: Path) -> None:
    """The current code writes the folder of the current format; see saved_format.py."""
    assert [folder.name for folder in FOLDERS] == [f"format_{number}" for number in range(1, FORMAT + 1)]
    assert {*ADDED, *REMOVED} <= set(range(2, FORMAT + 1))
    write(tmp_path / "now")
    now, then = (Checkpoint.open(folder).state for folder in (tmp_path / "now", FOLDERS[-1]))
    assert keys(now) == keys(then)


def keys(value: Any) -> Any:
    return {name: keys(inner) for name, inner in value.items()} if isinstance(value, dict) else None


@pytest.mark.parametrize(
    ("version", "message"),
    [
        (None, r"saved by a pre-release of megarl in a format .* Fix: start from scratch with another run.name"),
        ("7", r"unknown format '7'. Fix: use a checkpoint that megarl saved"),
        (0, r"unknown format 0. Fix: use"),
        (FORMAT + 1, rf"saved by a later version of megarl in format {FORMAT + 1}, .* up to {FORMAT}. Fix: update"),
    ],
)
def test_other_formats_are_refused(tmp_path: Path, version: Any, message: str) -> None:
    checkpoint = put(FOLDERS[-1], tmp_path)
    rewrite(checkpoint, lambda content: content.update({FORMAT_KEY: version}))
    with pytest.raises(UserError, match=message):
        start(config(tmp_path, "resume=auto"), PROMPTS)


def test_manifests_of_pre_releases_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"^m: saved by a pre-release of megarl"):
        checked_format({"format": 7}, Path("m"))


@pytest.fixture
def later_format(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend that two more formats exist, with added and removed keys in sections and in list entries."""
    added = {2: {"run.color": "red", "rewards.functions[].weight": 1.0}, 3: {"new.section": {"size": 3}, "top": None}}
    monkeypatch.setattr(saved_config, "FORMAT", 3)
    monkeypatch.setattr(saved_config, "ADDED", added)
    monkeypatch.setattr(saved_config, "REMOVED", {3: ("run.old", "rewards.functions[].name")})


SAVED_IN_2 = {"run": {"old": 1, "color": "blue"}, "rewards": {"functions": [{"name": "a", "weight": 2.0}]}}
SAVED_IN_1 = {"run": {"old": 1}, "rewards": {"functions": [{"name": "a"}, {"name": "b"}]}}
LATER = {"new": {"section": {"size": 3}}, "top": None}


@pytest.mark.usefixtures("later_format")
@pytest.mark.parametrize(
    ("saved", "version", "expected"),
    [
        (SAVED_IN_2, 3, SAVED_IN_2),
        (SAVED_IN_2, 2, LATER | {"run": {"color": "blue"}, "rewards": {"functions": [{"weight": 2.0}]}}),
        (
            SAVED_IN_1,
            1,
            LATER | {"run": {"color": "red"}, "rewards": {"functions": [{"weight": 1.0}, {"weight": 1.0}]}},
        ),
    ],
)
def test_later_formats_add_and_remove_keys(saved: dict, version: int, expected: dict) -> None:
    before = json.dumps(saved)
    assert complete(saved, version) == expected
    assert json.dumps(saved) == before
