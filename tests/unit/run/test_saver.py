"""Tests of saving: when checkpoints are due, when they are complete, and their metrics."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from megarl.cluster.failure import LostRanks
from megarl.cluster.pending import Pending, ready
from megarl.cluster.trained_models import TrainedModels
from megarl.config.load import load
from megarl.config.schema import Config
from megarl.core.checkpoint import Checkpoint, FileRecord, seal
from megarl.core.errors import InfrastructureFailure
from megarl.core.files import DISK_S
from megarl.run.checkpoints import Checkpoints
from megarl.run.saver import Saver
from tests.paths import BASE


class Group:
    """Fakes a TrainerGroup. The test controls when its files are written."""

    offloads: frozenset[str] = frozenset()

    def __init__(self) -> None:
        self.written, self.is_lost, self.num_launches = False, False, 1

    def save_checkpoint(self, checkpoint: Path) -> Pending[None]:
        self.written = False
        (checkpoint / "actor").mkdir()
        return ready(None)

    def checkpoint_written(self) -> Pending[bool]:
        self._require()
        return ready(self.written)

    def written_files(self, checkpoint: Path) -> list[FileRecord] | None:
        return self._files(checkpoint) if self.written else None

    def finish_checkpoint(self, checkpoint: Path) -> Pending[list[FileRecord]]:
        self._require()
        return ready(self._files(checkpoint))

    def _require(self) -> None:
        if self.is_lost:
            raise LostRanks("trainer-0 died.")

    def _files(self, checkpoint: Path) -> list[FileRecord]:
        (checkpoint / "actor" / "file").write_text("content")
        return [seal(checkpoint / "actor" / "file", checkpoint)]


def trained_models(group: Group) -> TrainedModels:
    return TrainedModels({"actor": group}, {"actor": ()})


def config(*overrides: str) -> Config:
    required = ["model.path=m", "data.source=arithmetic", "run.steps=7", "checkpoint.every_steps=3"]
    return load(BASE, [*required, *overrides])


def make_saver(folder: Path, *overrides: str) -> Saver:
    return Saver(folder, config(*overrides), num_bytes=100, data_hash="hash", models={})


def latest(folder: Path) -> int | None:
    path = Checkpoints(folder).latest()
    return path and Checkpoint.open(path).step


def test_driver_files_are_part_of_the_checkpoint(tmp_path):
    def write(folder: Path) -> list[FileRecord]:
        (folder / "rollouts").mkdir()
        (folder / "rollouts" / "waiting").write_text("samples")
        return [seal(folder / "rollouts" / "waiting", folder)]

    for saver in (make_saver(tmp_path / "waits"), make_saver(tmp_path / "interrupted")):
        group = Group()
        saver.save(trained_models(group), 3, {}, write=write)
        group.written = True
        if saver._checkpoints.path.name == "waits":
            saver.finish()
        else:
            saver.finish_written(3, left_s=lambda: 0.0)
        checkpoint = Checkpoint.open(Checkpoints(saver._checkpoints.path).latest())
        assert {record.path for record in checkpoint.files} == {"actor/file", "rollouts/waiting"}


@pytest.mark.parametrize("is_replaced", [False, True], ids=["lost", "replaced"])
@pytest.mark.parametrize("is_written", [False, True], ids=["unwritten", "written"])
def test_lost_rank_leaves_no_partial_checkpoint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], is_replaced: bool, is_written: bool
) -> None:
    """If all files had been written, the checkpoint is completed without its ranks. Otherwise it is dropped."""
    group, saver = Group(), make_saver(tmp_path)
    saver.save(trained_models(group), 3, {})
    group.written, group.is_lost = is_written, not is_replaced
    group.num_launches += is_replaced
    saver.commit()
    assert latest(tmp_path) == (3 if is_written else None)
    assert ("abandoned step 3" in capsys.readouterr().out) == (not is_written)
    assert saver.finish()
    group.is_lost = False
    saver.save(trained_models(group), 6, {})
    assert saver.finish()
    assert latest(tmp_path) == 6
    assert not list(tmp_path.glob(".*"))


def test_incomplete_last_checkpoint_is_reported(tmp_path: Path) -> None:
    group, saver = Group(), make_saver(tmp_path)
    saver.save(trained_models(group), 7, {})
    group.num_launches += 1
    assert not saver.finish()
    saver.save(trained_models(group), 7, {}, at_once=True)
    assert saver.finish()
    assert latest(tmp_path) == 7


def test_checkpoint_is_complete_when_its_files_are_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    group, saver = Group(), make_saver(tmp_path)
    assert saver.save(trained_models(group), 1, {}) == saver.save(trained_models(group), 2, {}) == {}
    metrics = saver.save(trained_models(group), 3, {"step": 3})
    assert metrics.keys() == {"time/checkpoint"} and metrics["time/checkpoint"] > 0
    saver.commit()
    assert latest(tmp_path) is None
    assert capsys.readouterr().out == f"checkpoint: copied step 3 to host memory, writing it to {tmp_path}\n"
    assert saver.save(trained_models(group), 4, {}) == {}
    group.written = True
    saver.commit()
    assert latest(tmp_path) == 3
    assert capsys.readouterr().out.startswith(f"checkpoint: completed {tmp_path}/step_000003 (0.00 GB in ")
    metrics = saver.save(trained_models(group), 5, {})
    assert metrics.keys() == {"time/checkpoint", "checkpoint/seconds", "checkpoint/bytes"}
    assert metrics["checkpoint/bytes"] == len("content")
    assert metrics["checkpoint/seconds"] > 0 < metrics["time/checkpoint"]
    state = Checkpoint.open(Checkpoints(tmp_path).latest()).state
    assert state == {"config": config().model_dump(), "data_hash": "hash", "models": {}, "run": {"step": 3}}


def test_foreground_checkpoint_is_complete_after_its_step(tmp_path: Path) -> None:
    saver = make_saver(tmp_path, "checkpoint.background=false")
    saver.save(trained_models(Group()), 3, {})
    saver.commit()
    assert latest(tmp_path) == 3


def test_next_save_and_finish_wait_for_the_previous_one(tmp_path: Path) -> None:
    group, saver = Group(), make_saver(tmp_path, "checkpoint.keep=1")
    for step in range(1, 8):
        saver.save(trained_models(group), step, {})
        saver.commit()
        assert latest(tmp_path) == {6: 3, 7: 6}.get(step)
    saver.finish()
    saver.finish()
    assert latest(tmp_path) == 7
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step_000007"]


class Clock:
    """Fakes a grace period during which a group's files are written after some polls."""

    def __init__(self, group: Group, polls: int, grace: int):
        self._group, self._polls, self._grace = group, polls, grace

    def left_s(self) -> float:
        self._polls, self._grace = self._polls - 1, self._grace - 1
        self._group.written = self._polls <= 0
        return float(self._grace)


def test_interrupt_finishes_the_checkpoint_in_progress(tmp_path: Path, capsys) -> None:
    group, saver = Group(), make_saver(tmp_path, "checkpoint.keep=1")
    saver.save(trained_models(group), 3, {"step": 3})
    saver.finish_written(3, Clock(group, polls=3, grace=5).left_s)
    assert latest(tmp_path) == 3
    assert "completed " in capsys.readouterr().out
    saver.finish_written(3, Clock(group, polls=3, grace=5).left_s)


def test_checkpoint_is_abandoned_after_the_grace_period(tmp_path: Path, capsys) -> None:
    group, saver = Group(), make_saver(tmp_path)
    saver.save(trained_models(group), 3, {})
    saver.finish_written(3, Clock(group, polls=9, grace=5).left_s)
    assert latest(tmp_path) is None
    expected = "checkpoint: writing step 3 did not finish within checkpoint.grace_s=20 s\n"
    assert capsys.readouterr().out.endswith(expected)


def test_written_checkpoint_is_finished_without_grace_period(tmp_path: Path) -> None:
    group, saver = Group(), make_saver(tmp_path)
    saver.save(trained_models(group), 3, {})
    group.written = True
    saver.finish_written(3, left_s=lambda: 0.0)
    assert latest(tmp_path) == 3


def test_checkpoint_without_metrics_is_not_finished(tmp_path: Path) -> None:
    """A run could not resume from a checkpoint without its step's metrics."""
    group, saver = Group(), make_saver(tmp_path)
    saver.save(trained_models(group), 3, {})
    group.written = True
    saver.finish_written(2, left_s=lambda: 1.0)
    assert latest(tmp_path) is None


def test_interrupt_during_completion_is_safe(tmp_path: Path, monkeypatch) -> None:
    group, saver = Group(), make_saver(tmp_path)
    saver.save(trained_models(group), 3, {})
    group.written = True
    with monkeypatch.context() as patches, pytest.raises(KeyboardInterrupt):
        patches.setattr(Checkpoints, "point_to", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        saver.finish()
    saver.finish_written(3, left_s=lambda: 1.0)
    group, saver = Group(), make_saver(tmp_path)
    saver.save(trained_models(group), 6, {})
    group.written = True
    with monkeypatch.context() as patches, pytest.raises(KeyboardInterrupt):
        patches.setattr(group, "finish_checkpoint", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        saver.finish()
    saver.finish_written(6, left_s=lambda: 1.0)
    assert latest(tmp_path) == 6


def test_at_once_saves_a_step_only_once(tmp_path: Path) -> None:
    group, saver = Group(), make_saver(tmp_path, "checkpoint.every_steps=null")
    for _ in range(2):
        saver.save(trained_models(group), 2, {"step": 2}, at_once=True)
    saver.finish()
    assert saver.save(trained_models(group), 2, {}, at_once=True).keys() >= {"checkpoint/bytes"}
    assert latest(tmp_path) == 2


def test_nothing_is_saved_without_every_steps(tmp_path: Path) -> None:
    saver = make_saver(tmp_path, "checkpoint.every_steps=null")
    assert saver.save(trained_models(Group()), 7, {}) == {}
    saver.finish()
    assert list(tmp_path.iterdir()) == []


def test_saver_waits_for_disk_space_before_writing(tmp_path: Path, monkeypatch) -> None:
    group, saver = Group(), make_saver(tmp_path)
    saver.save(trained_models(group), 3, {})
    saver.finish()
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**9, 10**9 - 99, 99))
    pauses: list[float] = []
    monkeypatch.setattr("megarl.run.checkpoints.time.sleep", pauses.append)
    with pytest.raises(InfrastructureFailure, match=r"^checkpoint.keep=2: .* 1 more checkpoint needs"):
        saver.save(trained_models(group), 6, {})
    assert latest(tmp_path) == 3 and sum(pauses) == DISK_S


BEST = (
    "evaluation.sets=[{name: a}]",
    "evaluation.every_steps=1",
    "evaluation.best.metric=evaluation/a/avg@1",
    "checkpoint.every_steps=1",
    "checkpoint.keep=2",
)


def run(saver: Saver, values: dict[int, float | None]) -> None:
    group = Group()
    for step, value in values.items():
        saver.note(step, {} if value is None else {"evaluation/a/avg@1": value})
        saver.save(trained_models(group), step, {})
        group.written = True
        saver.commit()


def kept(folder: Path) -> tuple[list[int], str | None]:
    best = Checkpoints(folder).best()
    return Checkpoints(folder).steps(), best and best.name


def test_best_checkpoint_is_kept_with_the_newest(tmp_path: Path) -> None:
    saver = make_saver(tmp_path, *BEST)
    run(saver, {1: 0.2})
    assert kept(tmp_path) == ([1], "step_000001")
    run(saver, {2: 0.5, 3: 0.4, 4: 0.5, 5: None})
    assert kept(tmp_path) == ([2, 4, 5], "step_000002"), "the first wins a tie"
    run(saver, {6: 0.6, 7: 0.1})
    assert kept(tmp_path) == ([6, 7], "step_000006"), "the best is among the newest"


def test_mode_min_keeps_the_smallest_value(tmp_path: Path) -> None:
    run(make_saver(tmp_path, *BEST, "evaluation.best.mode=min"), {1: 0.2, 2: 0.1, 3: 0.4, 4: 0.5})
    assert kept(tmp_path) == ([2, 3, 4], "step_000002")


def test_resumed_run_uses_earlier_evaluations(tmp_path: Path) -> None:
    run(make_saver(tmp_path, *BEST), {1: 0.9, 2: 0.5, 3: 0.4})
    again = Saver(tmp_path, config(*BEST), 100, "hash", {}, evaluated={0: 1.0, 1: 0.9, 2: 0.5, 3: 0.4})
    run(again, {4: 0.8, 5: 0.8})
    assert kept(tmp_path) == ([1, 4, 5], "step_000001")
    other = Saver(tmp_path, config(), 100, "hash", {})
    other.keep()
    assert kept(tmp_path) == ([4, 5], None), "no checkpoint is the best without a metric"
