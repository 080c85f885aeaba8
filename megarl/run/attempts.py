"""The attempts that a job has made at a run, each in a file of the job's folder in the run's."""

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


class Attempts:
    """The attempts at one run."""

    def __init__(self, run: Path):
        """run: the run's folder."""
        self._folder = run / LAUNCH / ATTEMPTS

    def begin(self, attempt: Attempt) -> Path:
        """Notes that an attempt begins. Returns its file, to be touched from time to time."""
        self._folder.mkdir(exist_ok=True)
        file = self._folder / str(max(numbered(self._folder, "{}"), default=0) + 1)
        replace_text(file, json.dumps(asdict(attempt)))
        return file

    def all(self) -> list[tuple[Attempt, float]]:
        """Returns the attempts, each with the last time at which it was seen to be under way."""
        files = numbered(self._folder, "{}").values()
        return [(Attempt(**json.loads(file.read_text(encoding="utf-8"))), file.stat().st_mtime) for file in files]

    def without_progress(self, step: int, job: str) -> list[Attempt]:
        """Returns the latest attempts of a job that began with the checkpoint of this step, and so made no newer
        one."""
        attempts = [attempt for attempt, _ in self.all() if attempt.job == job]
        return list(takewhile(lambda attempt: attempt.saved == step, reversed(attempts)))
