"""When checkpoints begin, when they are complete, and what is said of them."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from megarl.cluster.pending import Pending, ready
from megarl.cluster.trained_models import TrainedModels
from megarl.config.load import load
from megarl.config.schema import Config
from megarl.core.checkpoint import Checkpoint, FileRecord, seal
from megarl.run.checkpoints import Checkpoints
from megarl.run.saver import Saver
from tests.paths import BASE


class Group:
    """Stands in for a TrainerGroup whose files are written when the test says so."""

    offloads: frozenset[str] = frozenset()

    def __init__(self) -> None:
        self.written = False

    def save_checkpoint(self, checkpoint: Path) -> Pending[None]:
        self.written = False
        (checkpoint / "actor").mkdir()
        return ready(None)

    def checkpoint_written(self) -> Pending[bool]:
        return ready(self.written)

    def written_files(self, checkpoint: Path) -> list[FileRecord] | None:
        return self.finish_checkpoint(checkpoint).result() if self.written else None

    def finish_checkpoint(self, checkpoint: Path) -> Pending[list[FileRecord]]:
        (checkpoint / "actor" / "file").write_text("content")
        return ready([seal(checkpoint / "actor" / "file", checkpoint)])


def of(group: Group) -> TrainedModels:
    return TrainedModels({"actor": group}, {"actor": ()})


def config(*overrides: str) -> Config:
    required = ["model.path=m", "data.source=arithmetic", "run.steps=7", "checkpoint.every_steps=3"]
    return load(BASE, [*required, *overrides])


def saver(folder: Path, *overrides: str) -> Saver:
    return Saver(folder, config(*overrides), num_bytes=100, data_hash="hash", models={})


def latest(folder: Path) -> int | None:
    path = Checkpoints(folder).latest()
    return path and Checkpoint.open(path).step


def test_what_the_driver_writes_is_a_file_of_the_checkpoint(tmp_path):
    def write(folder: Path) -> list[FileRecord]:
        (folder / "rollouts").mkdir()
        (folder / "rollouts" / "waiting").write_text("samples")
        return [seal(folder / "rollouts" / "waiting", folder)]

    for ours in (saver(tmp_path / "waits"), saver(tmp_path / "interrupted")):
        group = Group()
        ours.save(of(group), 3, {}, write=write)
        group.written = True
        if ours._checkpoints.path.name == "waits":
            ours.finish()
        else:
            ours.finish_after_interrupt(3, left_s=lambda: 0.0)
        checkpoint = Checkpoint.open(Checkpoints(ours._checkpoints.path).latest())
        assert {record.path for record in checkpoint.files} == {"actor/file", "rollouts/waiting"}


def test_a_checkpoint_is_complete_when_its_files_are_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    group, ours = Group(), saver(tmp_path)
    assert ours.save(of(group), 1, {}) == ours.save(of(group), 2, {}) == {}
    metrics = ours.save(of(group), 3, {"step": 3})
    assert metrics.keys() == {"time/checkpoint"} and metrics["time/checkpoint"] > 0
    ours.commit()
    assert latest(tmp_path) is None
    assert capsys.readouterr().out == f"checkpoint: copied after step 3, and written to {tmp_path}\n"
    assert ours.save(of(group), 4, {}) == {}
    group.written = True
    ours.commit()
    assert latest(tmp_path) == 3
    assert capsys.readouterr().out.startswith(f"checkpoint: {tmp_path}/step_000003 is complete, 0.00 GB in ")
    metrics = ours.save(of(group), 5, {})
    assert metrics.keys() == {"time/checkpoint", "checkpoint/seconds", "checkpoint/bytes"}
    assert metrics["checkpoint/bytes"] == len("content")
    assert metrics["checkpoint/seconds"] > 0 < metrics["time/checkpoint"]
    state = Checkpoint.open(Checkpoints(tmp_path).latest()).state
    assert state == {"config": config().model_dump(), "data_hash": "hash", "models": {}, "run": {"step": 3}}


def test_without_background_it_is_complete_after_its_step(tmp_path: Path) -> None:
    ours = saver(tmp_path, "checkpoint.background=false")
    ours.save(of(Group()), 3, {})
    ours.commit()
    assert latest(tmp_path) == 3


def test_the_next_waits_for_the_one_before_and_the_end_for_the_last(tmp_path: Path) -> None:
    group, ours = Group(), saver(tmp_path, "checkpoint.keep=1")
    for step in range(1, 8):
        ours.save(of(group), step, {})
        ours.commit()
        assert latest(tmp_path) == {6: 3, 7: 6}.get(step)
    ours.finish()
    ours.finish()
    assert latest(tmp_path) == 7
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step_000007"]


class Clock:
    """The rest of a grace time, at whose end, after some questions, a group has written its files."""

    def __init__(self, group: Group, questions: int, grace: int):
        self._group, self._questions, self._grace = group, questions, grace

    def left_s(self) -> float:
        self._questions, self._grace = self._questions - 1, self._grace - 1
        self._group.written = self._questions <= 0
        return float(self._grace)


def test_what_is_in_host_memory_is_finished_after_an_interrupt(tmp_path: Path, capsys) -> None:
    group, ours = Group(), saver(tmp_path, "checkpoint.keep=1")
    ours.save(of(group), 3, {"step": 3})
    ours.finish_after_interrupt(3, Clock(group, questions=3, grace=5).left_s)
    assert latest(tmp_path) == 3
    assert "step_000003 is complete" in capsys.readouterr().out
    ours.finish_after_interrupt(3, Clock(group, questions=3, grace=5).left_s)


def test_it_is_not_when_the_grace_time_ends_before(tmp_path: Path, capsys) -> None:
    group, ours = Group(), saver(tmp_path)
    ours.save(of(group), 3, {})
    ours.finish_after_interrupt(3, Clock(group, questions=9, grace=5).left_s)
    assert latest(tmp_path) is None
    expected = "checkpoint: that of step 3 was not written within checkpoint.grace_s=20\n"
    assert capsys.readouterr().out.endswith(expected)


def test_one_that_is_written_is_finished_without_a_grace_time(tmp_path: Path) -> None:
    group, ours = Group(), saver(tmp_path)
    ours.save(of(group), 3, {})
    group.written = True
    ours.finish_after_interrupt(3, left_s=lambda: 0.0)
    assert latest(tmp_path) == 3


def test_one_without_its_steps_metrics_is_not_finished(tmp_path: Path) -> None:
    """A run could not go on from it."""
    group, ours = Group(), saver(tmp_path)
    ours.save(of(group), 3, {})
    group.written = True
    ours.finish_after_interrupt(2, left_s=lambda: 1.0)
    assert latest(tmp_path) is None


def test_an_interrupt_while_it_was_being_completed_does_no_harm(tmp_path: Path, monkeypatch) -> None:
    group, ours = Group(), saver(tmp_path)
    ours.save(of(group), 3, {})
    group.written = True
    with monkeypatch.context() as patches, pytest.raises(KeyboardInterrupt):
        patches.setattr(Checkpoints, "point_to", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        ours.finish()
    ours.finish_after_interrupt(3, left_s=lambda: 1.0)
    group, ours = Group(), saver(tmp_path)
    ours.save(of(group), 6, {})
    group.written = True
    with monkeypatch.context() as patches, pytest.raises(KeyboardInterrupt):
        patches.setattr(group, "finish_checkpoint", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        ours.finish()
    ours.finish_after_interrupt(6, left_s=lambda: 1.0)
    assert latest(tmp_path) == 6


def test_a_step_is_saved_at_once_unless_it_is(tmp_path: Path) -> None:
    group, ours = Group(), saver(tmp_path, "checkpoint.every_steps=null")
    for _ in range(2):
        ours.save(of(group), 2, {"step": 2}, at_once=True)
    ours.finish()
    assert ours.save(of(group), 2, {}, at_once=True).keys() >= {"checkpoint/bytes"}
    assert latest(tmp_path) == 2


def test_none_is_saved_where_none_is_asked_for(tmp_path: Path) -> None:
    ours = saver(tmp_path, "checkpoint.every_steps=null")
    assert ours.save(of(Group()), 7, {}) == {}
    ours.finish()
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_has_filled_up_is_noticed_before_a_file_is_written(tmp_path: Path, monkeypatch) -> None:
    group, ours = Group(), saver(tmp_path)
    ours.save(of(group), 3, {})
    ours.finish()
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**9, 10**9 - 99, 99))
    with pytest.raises(ValueError, match=r"^checkpoint.keep=2: .* 1 more checkpoint needs"):
        ours.save(of(group), 6, {})
    assert latest(tmp_path) == 3


BEST = (
    "evaluation.sets=[{name: a}]",
    "evaluation.every_steps=1",
    "evaluation.best.metric=evaluation/a/avg@1",
    "checkpoint.every_steps=1",
    "checkpoint.keep=2",
)


def run(ours: Saver, values: dict[int, float | None]) -> None:
    group = Group()
    for step, value in values.items():
        ours.note(step, {} if value is None else {"evaluation/a/avg@1": value})
        ours.save(of(group), step, {})
        group.written = True
        ours.commit()


def kept(folder: Path) -> tuple[list[int], str | None]:
    best = Checkpoints(folder).best()
    return Checkpoints(folder).steps(), best and best.name


def test_the_best_is_kept_beside_the_newest(tmp_path: Path) -> None:
    ours = saver(tmp_path, *BEST)
    run(ours, {1: 0.2})
    assert kept(tmp_path) == ([1], "step_000001")
    run(ours, {2: 0.5, 3: 0.4, 4: 0.5, 5: None})
    assert kept(tmp_path) == ([2, 4, 5], "step_000002"), "of equally good ones the first"
    run(ours, {6: 0.6, 7: 0.1})
    assert kept(tmp_path) == ([6, 7], "step_000006"), "which is among the newest"


def test_the_least_may_be_the_best(tmp_path: Path) -> None:
    run(saver(tmp_path, *BEST, "evaluation.best.mode=min"), {1: 0.2, 2: 0.1, 3: 0.4, 4: 0.5})
    assert kept(tmp_path) == ([2, 3, 4], "step_000002")


def test_a_run_that_goes_on_knows_the_values_so_far(tmp_path: Path) -> None:
    run(saver(tmp_path, *BEST), {1: 0.9, 2: 0.5, 3: 0.4})
    again = Saver(tmp_path, config(*BEST), 100, "hash", {}, evaluated={0: 1.0, 1: 0.9, 2: 0.5, 3: 0.4})
    run(again, {4: 0.8, 5: 0.8})
    assert kept(tmp_path) == ([1, 4, 5], "step_000001")
    other = Saver(tmp_path, config(), 100, "hash", {})
    other.keep()
    assert kept(tmp_path) == ([4, 5], None), "nothing is the best any more"
