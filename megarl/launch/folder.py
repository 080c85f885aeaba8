"""The folder of a job in its run's folder, by which the login node, the job's script and its tasks know of each other.

job.sbatch        the script, as it was submitted
recipe.yaml       the run's config, resolved
recipe-N.yaml     the same with fewer replicas, for an attempt on N nodes
job.json          the things that tasks need to know of the job, see Job
submitted         the number of the job that was submitted last
job-NUMBER.log    the output of the job
attempts/NUMBER   an attempt at the run, see run.attempts; touched as long as it is under way
preflight/NAME/   what each node of an attempt says of itself; each sees there that it shares files with the first
driver            node and process of the task that drives
verdict           how the attempt ended, why, and which nodes are bad, in a line each
cause             why the last attempt ended of which that is known
bad_nodes         those of all attempts; the script's own
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, Self

from megarl.core.files import replace_text
from megarl.run.folder import LAUNCH

Verdict = Literal["done", "told", "user_error", "stalled", "failed"]
"""The ways in which an attempt ends: with the run's last step; early, by a signal; by an error of the user, which the
next attempt would meet again; before it began, because earlier ones have saved nothing; by anything else."""


@dataclass(frozen=True, slots=True)
class Job:
    """The things that tasks need to know.

    folder   the working directory of `megarl launch`, where paths of the recipe begin
    nodes    the nodes of an attempt, as long as there are so many
    gpus     those that each node has for the run
    stalled  the attempts without a new checkpoint after which the job gives up
    """

    folder: str
    nodes: int
    gpus: int
    stalled: int


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

    def recipe_on(self, nodes: int) -> Path:
        """Return the file with the config of an attempt: on fewer nodes than the job's it is another one."""
        return self.recipe if nodes == self.job().nodes else self.path / f"recipe-{nodes}.yaml"

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

    def preflight(self, attempt: str) -> Path:
        """Return the folder for the reports of an attempt's nodes. attempt: its name."""
        return self.path / "preflight" / attempt

    def write_job(self, job: Job) -> None:
        (self.path / "job.json").write_text(json.dumps(asdict(job), indent=2) + "\n", encoding="utf-8")

    def job(self) -> Job:
        return Job(**json.loads((self.path / "job.json").read_text(encoding="utf-8")))

    def judge(self, verdict: Verdict, cause: str, bad: Sequence[str] = ()) -> None:
        """Say how the attempt ended. cause: one line for people; bad: the nodes to do without."""
        if verdict != "stalled":  # that follows from the attempts before
            replace_text(self.path / "cause", f"{cause}\n")
        replace_text(self.verdict, "".join(f"{line}\n" for line in (verdict, cause, *bad)))

    def forget_cause(self) -> None:
        (self.path / "cause").unlink(missing_ok=True)

    def last_cause(self) -> str:
        """Return why the last attempt ended, "" where there was none."""
        file = self.path / "cause"
        return file.read_text(encoding="utf-8").strip() if file.exists() else ""
