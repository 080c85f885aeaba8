"""The job folder inside a run's folder. The login node, the job script and its tasks communicate through it.

job.sbatch        the submitted script
recipe.yaml       resolved config of the run
recipe-N.yaml     the same with fewer replicas, for an attempt on N nodes
job.json          job settings for the tasks, see Job
prediction.json   predicted seconds per step by cause, see planner.predicted_time
submitted         id of the last submitted job
job-NUMBER.log    output of the job
attempts/NUMBER   an attempt, see run.attempts; its mtime is updated while the attempt runs
preflight/NAME/   report of each node in an attempt, which also shows that the node shares files with the first one
driver            node and process id of the driver task
verdict           outcome of the attempt, its cause, and the bad nodes, one per line
cause             cause of the last failed attempt
bad_nodes         bad nodes of all attempts, written by the script
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from megarl.core.files import read_record, read_text, replace_text
from megarl.run.folder import LAUNCH

Verdict = Literal["done", "signaled", "user_error", "stalled", "infrastructure", "failed"]
"""Outcome of an attempt: the run is complete (`done`), a signal stopped it (`signaled`), it hit a user error that would
recur (`user_error`), it did not start because earlier attempts saved no checkpoint (`stalled`), an external resource
such as disk space was unavailable (`infrastructure`), or it failed for another reason (`failed`)."""


@dataclass(frozen=True, slots=True)
class Job:
    """Job settings that every task of the job reads.

    Attributes:
        folder: working directory of `megarl launch` and of the tasks.
        nodes: number of nodes per attempt, unless an attempt runs on fewer.
        stalled: number of attempts without a new checkpoint after which the job gives up.
    """

    folder: str
    nodes: int
    gpus: int
    stalled: int


class JobFolder:
    """The paths in a run's job folder that several modules use."""

    def __init__(self, run: Path) -> None:
        self.path = run / LAUNCH
        self.script, self.recipe, self.submitted, self.driver, self.verdict = (
            self.path / name for name in ("job.sbatch", "recipe.yaml", "submitted", "driver", "verdict")
        )

    def recipe_on(self, nodes: int) -> Path:
        """Return the config file for an attempt on this number of nodes."""
        return self.recipe if nodes == self.job().nodes else self.path / f"recipe-{nodes}.yaml"

    def preflight(self, attempt: str) -> Path:
        """Return the folder for the node reports of the named attempt."""
        return self.path / "preflight" / attempt

    def write_job(self, job: Job) -> None:
        replace_text(self.path / "job.json", json.dumps(asdict(job), indent=2) + "\n")

    def job(self) -> Job:
        return read_record(self.path / "job.json", Job)

    def write_verdict(self, verdict: Verdict, cause: str, bad_nodes: Sequence[str] = ()) -> None:
        """Record the outcome of the attempt. bad_nodes: nodes to exclude from later attempts."""
        if verdict != "stalled":  # keep the cause of the last attempt that started
            replace_text(self.path / "cause", f"{cause}\n")
        replace_text(self.verdict, "".join(f"{line}\n" for line in (verdict, cause, *bad_nodes)))

    def forget_cause(self) -> None:
        (self.path / "cause").unlink(missing_ok=True)

    def last_cause(self) -> str:
        """Return the reason why the last attempt ended, or "" if there was no attempt."""
        file = self.path / "cause"
        return read_text(file).strip() if os.path.lexists(file) else ""
