"""Runs of the recipe of tests.e2e.run that can be interrupted at a chosen step."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.e2e.run import Run, write_recipe
from tests.timing import QUIET_S, START_S

STEPS = 12
"""Number of steps. Each has 4 of the 8 prompts, so every second step ends an epoch."""

KEYS = (
    "actor.optimizer.lr=0.01",
    "algorithm.kl={coefficient: 0.05, renew_steps: 3, renew_share: 0.5}",
    "batch.prompts_per_update=2",
    "checkpoint.every_steps=1",
    "run.export=true",
)
REWARD = """
from pathlib import Path
import time

GATE = Path(__file__).with_name("gate")
calls = 0


def digit_share(prompt, response, answer):
    global calls
    # A step has 16 samples; the right response is a trial. Half of the next step passes, but not all of it.
    while calls >= 16 * int(GATE.read_text()) + 8 and response != answer:
        GATE.with_name("held").touch()
        time.sleep(0.02)
    calls += response != answer
    with GATE.with_name("calls").open("a") as file:
        file.write("." * (response != answer))
    return sum(c.isdigit() for c in response) / max(1, len(response))
"""


class Recipe:
    """Runs of one recipe. A gate limits how many steps each run completes."""

    def __init__(self, folder: Path):
        self.folder, self.file = folder, write_recipe(folder)
        self._gate = folder / "gate"
        (folder / "gated.py").write_text(REWARD)
        self._overrides = [
            f"rewards.functions=[{{function: {folder}/gated.py:digit_share}}]",
            "rewards.processes=1",  # a single process, which counts all calls
            *KEYS,
        ]

    @contextmanager
    def run(self, folder: Path, gate: int, *overrides: str) -> Iterator[Run]:
        self._open_gate(gate)
        with Run(self.file, folder, *self._overrides, "resume=auto", *overrides) as run:
            yield run

    def interrupt_in_a_step(self, run: Run) -> None:
        """Signal the run's process group in the middle of its first step, as Slurm does, and then let the step end."""
        os.killpg(run.pid, signal.SIGTERM)
        run.wait_until(lambda: "interrupted: the run saves after the current step" in run.output)
        time.sleep(QUIET_S)  # an unprotected Ray process would exit in this time
        assert not run.metrics
        self._open_gate(1)

    def _open_gate(self, steps: int) -> None:
        """Set the gate atomically, so that concurrent readers never see an empty file."""
        new = self._gate.with_name("new gate")
        new.write_text(str(steps))
        new.replace(self._gate)

    def finish(self, folder: Path, *overrides: str) -> Run:
        """Run until the last step. Return the finished run."""
        with self.run(folder, STEPS, f"run.steps={STEPS}", *overrides) as run:
            assert run.end(START_S) == 0, run.errors
            return run
