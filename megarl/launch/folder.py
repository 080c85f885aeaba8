"""The folder of a job in its run's folder, by which the login node, the job's script and its tasks know of each other.

job.sbatch        the script, as it was submitted
recipe.yaml       the run's config, resolved
job.json          the things that tasks need to know of the job, see Job
submitted         the number of the job that was submitted last
job-NUMBER.log    the output of the job
attempts/NUMBER   an attempt at the run, see Attempt; touched as long as it is under way
preflight/STEP/   what each node of an attempt says of itself; each sees there that it shares files with the first
driver            node and process of the task that drives
verdict           how the attempt ended, why, and which nodes are bad, in a line each
bad_nodes         those of all attempts; the script's own
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import takewhile
from pathlib import Path
from typing import Literal, Self

from megarl.core.files import numbered, replace_text
from megarl.run.folder import LAUNCH

Verdict = Literal["done", "told", "user_error", "stalled", "failed"]
"""The ways in which an attempt ends: with the run's last step; early, by a signal; by an error of the user, which the
next attempt would meet again; before it began, because earlier ones have saved nothing; by anything else."""


@dataclass(frozen=True, slots=True)
class Job:
    """The things that tasks need to know.

    folder   the working directory of `megarl launch`, where paths of the recipe begin
    nodes    the nodes of an attempt
    gpus     those that each node has for the run
    stalled  the attempts without a new checkpoint after which the job gives up
    """

    folder: str
    nodes: int
    gpus: int
    stalled: int


@dataclass(frozen=True, slots=True)
class Attempt:
    """An attempt at the run, as it began. Times are in seconds since 1970.

    job         the job's number
    restart     how often it has been in the queue again
    allocated   when the allocation began
    saved       the step of the newest checkpoint then, 0 without one
    """

    job: str
    restart: int
    allocated: float
    began: float
    saved: int


@dataclass(frozen=True, slots=True)
class JobFolder:
    path: Path

    @classmethod
    def of(cls, run: Path) -> Self:
        return cls(run / LAUNCH)

    @property
    def script(self) -> Path:
        return self.path / "job.sbatch"

    @property
    def recipe(self) -> Path:
        return self.path / "recipe.yaml"

    @property
    def submitted(self) -> Path:
        """The file with the number of the job that was submitted last."""
        return self.path / "submitted"

    @property
    def driver(self) -> Path:
        return self.path / "driver"

    @property
    def verdict(self) -> Path:
        return self.path / "verdict"

    def preflight(self, step: str) -> Path:
        """Returns the folder of one step of a job: of one attempt."""
        return self.path / "preflight" / step

    def write_job(self, job: Job) -> None:
        (self.path / "job.json").write_text(json.dumps(asdict(job), indent=2) + "\n", encoding="utf-8")

    def job(self) -> Job:
        return Job(**json.loads((self.path / "job.json").read_text(encoding="utf-8")))

    def begin(self, attempt: Attempt) -> Path:
        """Notes that an attempt begins. Returns its file, to be touched from time to time."""
        folder = self.path / "attempts"
        folder.mkdir(exist_ok=True)
        file = folder / str(max(numbered(folder, "{}"), default=0) + 1)
        replace_text(file, json.dumps(asdict(attempt)))
        return file

    def attempts(self) -> list[tuple[Attempt, float]]:
        """Returns the attempts, each with the last time at which it was seen to be under way."""
        files = numbered(self.path / "attempts", "{}").values()
        return [(Attempt(**json.loads(file.read_text(encoding="utf-8"))), file.stat().st_mtime) for file in files]

    def saved_nothing(self, step: int, job: str) -> list[Attempt]:
        """Returns the latest attempts of a job that began with the checkpoint of this step, and so made no newer
        one."""
        attempts = [attempt for attempt, _ in self.attempts() if attempt.job == job]
        return list(takewhile(lambda attempt: attempt.saved == step, reversed(attempts)))

    def judge(self, verdict: Verdict, cause: str, bad: Sequence[str] = ()) -> None:
        """Says how the attempt ended. cause: one line for people; bad: the nodes to do without."""
        replace_text(self.verdict, "".join(f"{line}\n" for line in (verdict, cause, *bad)))
