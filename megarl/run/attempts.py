"""The attempts of a Slurm job to run a recipe. Each attempt has a file under the run folder."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from itertools import takewhile
from pathlib import Path

from megarl.core.files import numbered, replace_text
from megarl.run.folder import LAUNCH

ATTEMPTS = "attempts"


@dataclass(frozen=True, slots=True)
class Attempt:
    """The start of one attempt. Times are Unix timestamps.

    Attributes:
        job: the Slurm job id.
        restart: number of times that Slurm has requeued the job.
        allocated: start of the allocation.
        began: start of the attempt.
        saved: step of the newest checkpoint at that time, 0 without one.
    """

    job: str
    restart: int
    allocated: float
    began: float
    saved: int


class Attempts:
    """The attempts of one run, stored in its folder `run`."""

    def __init__(self, run: Path):
        self._folder = run / LAUNCH / ATTEMPTS

    def begin(self, attempt: Attempt) -> Path:
        """Record the start of an attempt. Return its file, which the caller touches as a heartbeat."""
        self._folder.mkdir(exist_ok=True)
        file = self._folder / str(max(numbered(self._folder, "{}"), default=0) + 1)
        replace_text(file, json.dumps(asdict(attempt)))
        return file

    def all(self) -> list[tuple[Attempt, float]]:
        """Return all attempts, each with the time of its last heartbeat."""
        files = numbered(self._folder, "{}").values()
        return [(Attempt(**json.loads(file.read_text(encoding="utf-8"))), file.stat().st_mtime) for file in files]

    def without_progress(self, step: int, job: str) -> list[Attempt]:
        """Return a job's trailing attempts that started from the checkpoint of `step`, newest first. If that is the
        newest checkpoint, none of them has made progress."""
        attempts = [attempt for attempt, _ in self.all() if attempt.job == job]
        return list(takewhile(lambda attempt: attempt.saved == step, reversed(attempts)))
