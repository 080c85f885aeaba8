"""A resumed run trains on the rollouts that an earlier attempt finished after the checkpoint."""

from __future__ import annotations

import json
import random
from pathlib import Path
from types import SimpleNamespace

import pytest

from megarl.core.sample import SampleRef
from megarl.data.cursor import PromptCursor
from megarl.step.finished import FinishedRollouts
from megarl.step.state import PendingPrompt, RunState
from tests.unit.step.test_queue import PER_STEP, Rollouts, Saves, config_of, queue_of


def ref(name: str, row: int, oldest: int, newest: int) -> SampleRef:
    return SampleRef(f"{name}.0", str(row), 1, 1, 1, "stop", oldest, newest, rollout_id=f"{name}.0")


class Attempts:
    """Attempts of a run that resume from the same checkpoint. The weights are those of the checkpoint."""

    def __init__(self, folder: Path, max_staleness: int = 0, num_rows: int = 1000):
        self.config, self.saves = config_of(max_staleness), Saves(folder)
        self.saved = json.loads(json.dumps(RunState(4, PromptCursor(num_rows, seed=0, shuffle=False)).dump()))
        self.saves.run = json.dumps(self.saved)

    def begin_step(self, *finishing: int) -> tuple[list[str], list[str]]:
        """Resume, begin step 5, and finish its groups with these numbers before the run is killed. Return the names of
        the groups that are sampled, and of those that are not."""
        state, rollouts = RunState.restore(self.saved, self.config, None), Rollouts(random.Random(0))
        rollouts.version = 4
        queue = queue_of(self.config, rollouts, state, self.saves)
        queue.restore(self.saves)
        state.step = 5
        queue.begin(5, PER_STEP)
        sampled = [group[0].sample_id[:-2] for pending in rollouts.under_way for group in pending.groups]
        used = [group.names[0][:-2] for group in queue._schedule.finished]
        for pending in [*rollouts.under_way]:
            rollouts.end(pending)
            chosen = [group for group in pending.result() if int(group[0].id.split(".")[1]) in finishing]
            self.saves.write(SimpleNamespace(result=lambda chosen=chosen: chosen))
        taken = queue.take(5, PER_STEP, lambda: None)
        uninterrupted = RunState.restore(self.saved, self.config, None).draw(PER_STEP, 4)
        assert [int(group[0].prompt_id) for group in taken] == [item.row for item in uninterrupted]
        return sampled, used


def test_only_unfinished_prompts_are_sampled_again(tmp_path):
    run = Attempts(tmp_path)
    assert run.begin_step(0, 2) == (["5.0", "5.1", "5.2"], [])
    assert run.begin_step() == (["5.1"], ["5.0", "5.2"])
    assert run.begin_step(1) == (["5.1"], ["5.0", "5.2"]), "a second kill loses nothing"
    assert run.begin_step() == ([], ["5.0", "5.1", "5.2"])


def test_repeated_prompt_keeps_its_positions(tmp_path):
    """The step draws the only row three times."""
    run = Attempts(tmp_path, num_rows=1)
    run.begin_step(1, 2)
    assert run.begin_step() == (["5.0"], ["5.1", "5.2"])


def test_rollouts_ahead_are_used_too(tmp_path):
    run = Attempts(tmp_path, max_staleness=1)
    assert run.begin_step(1, 4)[0] == [f"5.{i}" for i in range(6)]
    assert run.begin_step() == (["5.0", "5.2", "5.3", "5.5"], ["5.1", "5.4"])


def test_rollouts_of_other_settings_are_removed(tmp_path):
    run = Attempts(tmp_path)
    run.begin_step(0)
    run.config = config_of(0, "rollout.temperature=0.5")
    assert run.begin_step() == (["5.0", "5.1", "5.2"], [])
    run.config = config_of(0)
    assert run.begin_step(0)[1] == [], "the first attempt's files must be removed"


@pytest.mark.parametrize(
    ("oldest", "newest", "is_used"), [(4, 4, True), (3, 4, False), (4, 5, False)], ids=["same", "older", "newer"]
)
def test_version_of_rollouts_must_fit(tmp_path, oldest, newest, is_used):
    """An older group is from an earlier epoch. Weights that are newer than the checkpoint's are trained again."""
    saves = Saves(tmp_path)
    saves.run = json.dumps({"step": 4})
    finished = FinishedRollouts(config_of(0), saves, tmp_path)
    finished.begin(4)
    folder, _ = saves.target
    saves.written[folder] = {"5.0": [ref("5.0", 7, oldest, newest)]}
    finished = FinishedRollouts(config_of(0), saves, tmp_path)
    finished.restore(saves)
    assert finished.take(PendingPrompt(8, 4, 8), "8", "5.0") is None, "it is another prompt's"
    assert (finished.take(PendingPrompt(7, 4, 7), "7", "5.1") is not None) == is_used


def test_rollouts_for_a_later_checkpoint_are_used_once(tmp_path):
    """The run falls back to the checkpoint of step 4, and trains other weights in step 5 than before."""
    saves = Saves(tmp_path)
    for step in (4, 5):
        FinishedRollouts(config_of(0), saves, tmp_path).begin(step)
    saves.written[saves.target[0]] = {"5.0": [ref("5.0", 7, 4, 4)], "6.0": [ref("6.0", 8, 5, 5)]}
    saves.run = json.dumps({"step": 4})
    finished = FinishedRollouts(config_of(0), saves, tmp_path)
    finished.restore(saves)
    assert [path.name for path in tmp_path.iterdir()] == ["after_000004"]
    assert finished.take(PendingPrompt(7, 4, 7), "7", "5.0") is not None
    assert finished.take(PendingPrompt(8, 4, 8), "8", "5.1") is None


def test_names_of_unused_rollouts_are_avoided(tmp_path):
    """With rollouts ahead, a resumed step may start other prompts at the same positions."""
    saves = Saves(tmp_path)
    saves.run = json.dumps({"step": 4})
    finished = FinishedRollouts(config_of(0), saves, tmp_path)
    finished.begin(4)
    saves.written[saves.target[0]] = {"5.1": [ref("5.1", 7, 4, 4)]}
    finished = FinishedRollouts(config_of(0), saves, tmp_path)
    finished.restore(saves)
    assert finished.free_places(5, 0, 3) == [0, 2, 3]
    assert finished.free_places(6, 0, 3) == [0, 1, 2]


def test_files_are_kept_until_the_next_checkpoint_is_complete(tmp_path):
    finished = FinishedRollouts(config_of(0), Saves(tmp_path), tmp_path)
    for step in (2, 4, 6):
        finished.begin(step)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["after_000004", "after_000006"]


@pytest.mark.parametrize(("max_staleness", "is_used"), [(2, True), (1, False)])
def test_stale_rollouts_are_sampled_again(tmp_path, max_staleness, is_used):
    """The rollouts of row 9 started with version 2."""
    run = Attempts(tmp_path, max_staleness)
    FinishedRollouts(run.config, run.saves, tmp_path).begin(4)
    run.saves.written[run.saves.target[0]] = {"3.0": [ref("3.0", 9, 2, 4)]}
    state = RunState(4, PromptCursor(1000, seed=0, shuffle=False), under_way=[PendingPrompt(9, 2, 9)])
    run.saved = json.loads(json.dumps(state.dump()))
    assert (run.begin_step()[1] == ["3.0"]) == is_used
