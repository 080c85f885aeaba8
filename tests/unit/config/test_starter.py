"""The recipe that `megarl init` creates, with its data and its reward function."""

from __future__ import annotations

from pathlib import Path

import pytest

from megarl.config import starter
from megarl.config.load import load
from megarl.data.files import file_rows
from megarl.rewards.registry import resolve


@pytest.mark.parametrize("name", ["my-run", 'a: "folder" #1', "."])
def test_recipe_finds_its_data_and_reward_function(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.chdir(tmp_path)
    recipe, *others = starter.write(Path(name))
    assert sorted(path.name for path in (recipe, *others)) == sorted(path.name for path in Path(name).iterdir())
    config = load(recipe)
    rows = list(file_rows(Path(config.data.source), config.data.prompt_column, config.data.answer_column))
    assert len(rows) >= config.batch.prompts_per_step
    [entry] = config.rewards.functions
    reward = resolve(entry.function)
    right, wordy, wrong = f"{rows[0].answer}.", f"The answer to this question is {rows[0].answer}.", "I do not know."
    assert [reward(rows[0].prompt, text, rows[0].answer) for text in (right, wordy, wrong)] == [1.0, 0.5, 0.0]


def test_existing_files_are_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "reward.py").write_text("mine")
    with pytest.raises(ValueError, match=r"reward.py already exists. Fix: choose another folder$"):
        starter.write(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["reward.py"]


def test_error_names_an_unwritable_folder(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("a file")
    with pytest.raises(
        ValueError, match=r"/taken/a: cannot be written \(Not a directory\). Fix: choose a writable folder"
    ):
        starter.write(tmp_path / "taken" / "a")
