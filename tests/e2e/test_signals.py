"""A run interrupted by Slurm or a terminal saves a checkpoint if it can."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from megarl.core.checkpoint import Checkpoint
from megarl.run.checkpoints import Checkpoints
from tests.e2e.run import Run, write_recipe
from tests.e2e.test_faults import INTERRUPTED, check_end

pytestmark = [pytest.mark.slow, pytest.mark.exhaustive]


def check_saved(run: Run, step: int) -> None:
    checkpoint = Checkpoint.open(Checkpoints(run.folder / "checkpoints").latest())
    checkpoint.verify(checkpoint.files)
    assert (checkpoint.step, len(run.metrics)) == (step, step)
    assert f"checkpoint: completed {checkpoint.path} " in run.output
    assert f"The run ended. Resume it from step_{step:06d} with: megarl train " in run.output


def hold_after_a_copy(run: Run, hold: Path) -> None:
    """Wait until a step is held while the previous step's checkpoint is written but not committed by the driver."""
    while True:
        hold.touch()
        run.wait_until_held(hold.parent)
        done = len(run.metrics)
        if len(list(run.folder.glob(f"checkpoints/.step_{done:06d}/actor/__*.written"))) == 2:
            return
        hold.unlink()
        run.wait_for_step(done + 1)


def test_pending_checkpoint_is_finished_while_a_rank_is_busy(tmp_path: Path) -> None:
    """tests/e2e/test_resume.py covers a signal during a step that saves a checkpoint."""
    recipe, hold = write_recipe(tmp_path), tmp_path / "hold"

    def interrupt_while_a_rank_is_busy() -> None:
        run.find("ray::TrainerActor").suspend()
        os.killpg(run.pid, signal.SIGINT)

    with Run(recipe, tmp_path, "checkpoint.every_steps=1") as run:
        run.wait_for_step(2)
        hold_after_a_copy(run, hold)
        check_end(run, interrupt_while_a_rank_is_busy, 130, INTERRUPTED)
    check_saved(run, step=len(run.metrics))
