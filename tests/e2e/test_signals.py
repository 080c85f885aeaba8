"""A run that is told to end, as Slurm and a terminal do it, has saved what it can, and goes on after that."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from megarl.core.checkpoint import Checkpoint
from megarl.run.checkpoints import Checkpoints
from tests.e2e.run import Run, write_recipe
from tests.e2e.test_faults import INTERRUPTED, check_end

pytestmark = pytest.mark.slow
HELD_S = 3.0
"""Longer than a step takes that is not held."""


def check_saved(run: Run, step: int) -> None:
    checkpoint = Checkpoint.open(Checkpoints(run.folder / "checkpoints").latest())
    checkpoint.verify(checkpoint.files)
    assert (checkpoint.step, len(run.metrics)) == (step, step)
    assert f"checkpoint: {checkpoint.path} is complete" in run.output
    assert f"ended; step_{step:06d} is saved: go on after it with megarl train " in run.output


def hold_after_a_copy(run: Run, hold: Path) -> None:
    """Returns while a step is held and the checkpoint of the one before is written, but not complete: the driver has
    not asked for it yet."""
    while True:
        hold.touch()
        done = 0
        while done != len(run.metrics):
            done = len(run.metrics)
            time.sleep(HELD_S)
        if len(list(run.folder.glob(f"checkpoints/.step_{done:06d}/actor/__*.written"))) == 2:
            return
        hold.unlink()
        run.wait_for_step(done + 1)


def test_a_signal_to_the_group_saves_the_step_and_the_next_run_goes_on(tmp_path: Path) -> None:
    recipe, hold = write_recipe(tmp_path), tmp_path / "hold"
    hold.touch()

    def tell_in_a_step() -> None:
        os.killpg(run.pid, signal.SIGTERM)
        run.wait_until(lambda: "interrupted; saves after the step under way" in run.output)
        time.sleep(HELD_S)  # Ray's processes would be gone
        assert not run.metrics
        hold.unlink()

    with Run(recipe, tmp_path, "checkpoint.on_signal=true", "checkpoint.grace_s=100") as run:
        run.find("ray::RewardActor.score")
        check_end(run, tell_in_a_step, 130, INTERRUPTED)
    check_saved(run, step=1)

    def tell_while_a_rank_is_busy() -> None:
        run.find("ray::TrainerActor").suspend()
        os.killpg(run.pid, signal.SIGINT)

    with Run(recipe, tmp_path, "checkpoint.every_steps=1", "resume=auto") as run:
        run.wait_for_step(2)
        assert "goes on after step 1, " in run.output
        hold_after_a_copy(run, hold)
        check_end(run, tell_while_a_rank_is_busy, 130, INTERRUPTED)
    check_saved(run, step=len(run.metrics))
