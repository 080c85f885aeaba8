"""A resumed run trains on the rollouts that an earlier attempt finished, if the same weights sampled them."""

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
from tests.killed import killed_after
from tests.unit.step.test_queue import PER_STEP, Rollouts, Saves, config_of, queue_of

ORIGIN = {"data": "hash", "code": []}


def weights(digest: str | None) -> dict[str, dict[str, str]]:
    return {} if digest is None else {"sample": {"regions": "", "trainer": digest}}


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
        queue.finished.restore(4)
        queue.finished.note_weights(4, weights("4"))
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


@pytest.mark.parametrize("keeps_others", [True, False])
def test_rollouts_without_tokens_do_not_make_a_group_stale(tmp_path, keeps_others):
    """They failed before their first turn."""
    run = Attempts(tmp_path)
    run.begin_step(0, 2)
    for group in run.saves.written.values():
        name = group[0].rollout_id[:-1] + "1"
        empty = SampleRef(name, group[0].prompt_id, 1, 0, 0, "stop", 0, 0, rollout_id=name)
        group[:] = [*(group if keeps_others else ()), empty]
    assert run.begin_step() == (["5.1"], ["5.0", "5.2"])


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


class Folder:
    """The finished groups of a run, with fakes of its reward process and weights."""

    def __init__(self, path: Path):
        self.saves, self.path = Saves(path / "finished"), path

    def attempt(self, step: int, digest: str | None = "same", **settings) -> FinishedRollouts:
        """Start an attempt that resumes after `step`, with these weights."""
        settings = {"config": config_of(0), "origin": ORIGIN, "reproduces": True, "moved": None} | settings
        moved = settings.pop("moved")
        finished = FinishedRollouts(rewards=self.saves, folder=self.saves.folder, **settings)
        finished.restore(step, moved)
        finished.note_weights(step, weights(digest))
        return finished

    def finish(self, name: str, row: int, oldest: int, newest: int) -> None:
        group = [ref(name, row, oldest, newest)]
        self.saves.write(SimpleNamespace(result=lambda: [group]))


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return Folder(tmp_path)


def is_used(finished: FinishedRollouts, name: str, row: int, version: int) -> bool:
    return finished.take(PendingPrompt(row, version, row), str(row), name) is not None


@pytest.mark.parametrize(("oldest", "expected"), [(4, True), (3, False)])
def test_version_of_rollouts_must_fit(folder: Folder, oldest: int, expected: bool) -> None:
    """An older group is from an earlier epoch."""
    folder.attempt(4)
    folder.finish("5.0", 7, oldest, 4)
    finished = folder.attempt(4)
    assert not is_used(finished, "5.0", 8, 4), "it is another prompt's"
    assert is_used(finished, "5.1", 7, 4) == expected


@pytest.mark.parametrize(("again", "expected"), [("five", True), ("other", False), (None, False)])
def test_newer_rollouts_need_the_same_weights(folder: Folder, again: str | None, expected: bool) -> None:
    finished = folder.attempt(4)
    finished.note_weights(5, weights("five"))
    folder.finish("6.0", 7, 5, 5)
    folder.finish("6.1", 8, 4, 5)
    finished.note_weights(6, weights("six"))
    folder.finish("7.0", 9, 6, 6)
    finished = folder.attempt(4)
    assert not is_used(finished, "6.0", 7, 4), "the run does not have these weights yet"
    assert finished.free_places(6, 0, 2) == [2, 3]
    finished.note_weights(5, weights(again))
    assert is_used(finished, "6.0", 7, 5) == expected
    assert not is_used(finished, "7.0", 9, 6)
    finished.note_weights(6, weights("six"))
    assert is_used(finished, "7.0", 9, 6) == expected, "weights after different ones are other weights"
    assert finished.free_places(7, 0, 1) == [1 if expected else 0]
    finished = folder.attempt(4)
    finished.note_weights(5, weights("five"))
    assert is_used(finished, "6.1", 8, 4) == expected, "they are removed for good"


def test_irreproducible_weights_write_no_newer_rollouts(folder: Folder) -> None:
    finished = folder.attempt(4, reproduces=False)
    finished.note_weights(5, weights("five"))
    folder.finish("6.0", 7, 5, 5)
    folder.finish("5.0", 8, 4, 4)
    assert len(folder.saves.written) == 1


def test_rollouts_of_an_unfinished_checkpoint_need_its_weights(folder: Folder) -> None:
    """An attempt is killed while it saves step 8. The next one, from step 4, reaches other weights and saves step 8."""
    finished = folder.attempt(4, reproduces=False)
    finished.note_weights(8, weights("first"))
    finished.begin(8)
    folder.finish("9.0", 7, 8, 8)
    finished = folder.attempt(4, reproduces=False)
    finished.note_weights(8, weights("second"))
    finished.begin(8)
    assert not is_used(folder.attempt(8, "second", reproduces=False), "9.0", 7, 8)


@pytest.mark.parametrize(
    ("digest", "settings", "expected"),
    [
        ("same", {}, True),
        ("other", {}, False),
        (None, {}, False),
        ("same", {"origin": ORIGIN | {"data": "other"}}, False),
        ("same", {"config": config_of(0, "run.seed=1")}, False),
    ],
    ids=["same", "weights", "unknown weights", "data", "settings"],
)
def test_rollouts_before_the_first_checkpoint(folder: Folder, digest, settings, expected: bool) -> None:
    folder.attempt(0)
    folder.finish("1.0", 7, 0, 0)
    assert is_used(folder.attempt(0, digest, **settings), "1.0", 7, 0) == expected


def test_unverified_initial_weights_write_nothing(folder: Folder) -> None:
    folder.attempt(0, None)
    folder.finish("1.0", 7, 0, 0)
    assert not folder.saves.written


def test_run_without_checkpoints_writes_nothing(folder: Folder) -> None:
    """Otherwise, the number of files would be unlimited."""
    never = config_of(0, "checkpoint.every_steps=null")
    folder.attempt(0, config=never).note_weights(1, weights("one"))
    folder.finish("1.0", 7, 0, 0)
    assert not folder.saves.written
    folder.attempt(4, config=never).note_weights(5, weights("five"))  # resumed from a checkpoint on a signal
    folder.finish("6.0", 7, 5, 5)
    folder.finish("5.0", 8, 4, 4)
    assert len(folder.saves.written) == 1


def test_rollouts_of_a_folder_moved_aside_are_used(folder: Folder) -> None:
    folder.attempt(0)
    folder.finish("1.0", 7, 0, 0)
    moved = folder.saves.folder.rename(folder.path / "moved")
    assert is_used(folder.attempt(0, moved=moved), "1.0", 7, 0)
    assert is_used(folder.attempt(0), "1.0", 7, 0)


def test_rollouts_for_a_later_checkpoint_are_used(folder: Folder) -> None:
    """The later checkpoint is damaged or incomplete, so the run resumes from the one of step 4."""
    finished = folder.attempt(4)
    folder.finish("5.0", 7, 4, 4)
    finished.note_weights(5, weights("five"))
    finished.begin(5)
    folder.finish("6.0", 8, 5, 5)
    for _ in range(2):
        finished = folder.attempt(4)
        assert [path.name for path in folder.saves.folder.iterdir()] == ["after_000004"]
        assert is_used(finished, "5.0", 7, 4) and not is_used(finished, "6.0", 8, 5)
        finished.note_weights(5, weights("five"))
        finished.begin(5)
        assert is_used(finished, "6.0", 8, 5), "a checkpoint in between must not matter"


def test_unused_rollouts_move_to_the_next_checkpoint(folder: Folder) -> None:
    finished = folder.attempt(4)
    finished.note_weights(5, weights("five"))
    folder.finish("6.0", 7, 5, 5)
    folder.finish("5.0", 8, 4, 4)
    finished = folder.attempt(4)
    finished.note_weights(5, weights("five"))
    finished.begin(5)
    finished = folder.attempt(5)
    assert is_used(finished, "6.0", 7, 5)
    assert not is_used(finished, "5.0", 8, 4), "it is too stale for step 6"


def test_names_of_unused_rollouts_are_avoided(folder: Folder) -> None:
    """With rollouts ahead, a resumed step may start other prompts at the same positions."""
    folder.attempt(4)
    folder.finish("5.1", 7, 4, 4)
    finished = folder.attempt(4)
    assert finished.free_places(5, 0, 3) == [0, 2, 3]
    assert finished.free_places(6, 0, 3) == [0, 1, 2]


def test_damaged_rollouts_are_sampled_under_the_same_name(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    folder.attempt(4)
    folder.finish("5.1", 7, 4, 4)
    monkeypatch.setattr(folder.saves, "load_finished", lambda files: [])
    finished = folder.attempt(4)
    assert finished.free_places(5, 0, 2) == [0, 1] and not is_used(finished, "5.1", 7, 4)
    finished.begin(5)


@pytest.mark.parametrize(
    "content",
    [None, b"", b"[]", b'{"config": {}}', b'{"config": {}, "data": "hash", "weights": 2}'],
    ids=["missing", "empty", "list", "incomplete", "malformed"],
)
def test_damaged_record_discards_the_rollouts(folder: Folder, content: bytes | None) -> None:
    """The record is missing if an attempt was killed between creating a folder and writing its record."""
    folder.attempt(4)
    folder.finish("5.1", 7, 4, 4)
    record = folder.saves.folder / "after_000004/record.json"
    record.unlink() if content is None else record.write_bytes(content)
    assert not is_used(folder.attempt(4), "5.1", 7, 4)
    folder.finish("5.1", 7, 4, 4)
    assert is_used(folder.attempt(4), "5.1", 7, 4)


def test_rollouts_survive_a_kill_at_any_operation(tmp_path: Path) -> None:
    """An attempt that resumes after step 4 receives the weights of step 5 and saves a checkpoint. It is killed, and the
    next attempt resumes from the same step, because the later checkpoint is incomplete."""
    for limit in range(200):
        folder = Folder(tmp_path / str(limit))
        folder.attempt(4)
        folder.finish("5.0", 7, 4, 4)

        def resume_and_save(folder: Folder = folder) -> None:
            finished = folder.attempt(4)
            finished.note_weights(5, weights("five"))
            finished.begin(5)

        was_killed = killed_after(limit, resume_and_save)
        assert is_used(folder.attempt(4), "5.0", 7, 4)
        if not was_killed:
            break
    assert not was_killed and limit > 10


@pytest.mark.parametrize("code", [[], [["rewards.functions", "changed"]]])
def test_changed_code_discards_rewards_only(folder: Folder, code: list) -> None:
    folder.attempt(4)
    folder.finish("5.1", 7, 4, 4)
    [file] = (folder.saves.folder / "after_000004").glob("*.safetensors")
    results = file.with_name(f"{file.stem}.00000000.json")
    results.touch()
    assert is_used(folder.attempt(4, origin={"data": "hash", "code": code}), "5.1", 7, 4)
    assert results.exists() == (not code)


def test_files_are_kept_until_the_next_checkpoint_is_complete(folder: Folder) -> None:
    finished = folder.attempt(2)
    for step in (4, 6):
        finished.begin(step)
    assert sorted(path.name for path in folder.saves.folder.iterdir()) == ["after_000004", "after_000006"]


@pytest.mark.parametrize(("max_staleness", "expected"), [(2, True), (1, False)])
def test_stale_rollouts_are_sampled_again(tmp_path: Path, max_staleness: int, expected: bool) -> None:
    """The rollouts of row 9 started with version 2."""
    run = Attempts(tmp_path, max_staleness)
    FinishedRollouts(run.config, run.saves, tmp_path, ORIGIN).begin(4)
    run.saves.put([ref("3.0", 9, 2, 4)])
    state = RunState(4, PromptCursor(1000, seed=0, shuffle=False), under_way=[PendingPrompt(9, 2, 9)])
    run.saved = json.loads(json.dumps(state.dump()))
    assert (run.begin_step()[1] == ["3.0"]) == expected
