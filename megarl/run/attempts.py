"""Records a Slurm job's attempts to run a recipe. Each attempt has its own file in the run folder."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import takewhile
from pathlib import Path

from megarl.core.errors import UserError
from megarl.core.files import numbered, read_record, replace_text
from megarl.run.folder import LAUNCH

ATTEMPTS = "attempts"

ALLOCATED = "MEGARL_ALLOCATED"
"""Environment variable with the start of the Slurm allocation, as a Unix timestamp."""


@dataclass(frozen=True, slots=True)
class Attempt:
    """The record of an attempt, written at its start and completed at its end. Times are Unix timestamps; 0 if
    unknown.

    Attributes:
        restart: number of times that Slurm has requeued the job.
        saved: step of the newest checkpoint at the start of the attempt, or 0 if there was no checkpoint.
        submitted: time at which the job entered Slurm's queue: when it was submitted or, later, last requeued.
        nodes: number of nodes in the allocation, including spare nodes.
        noticed: time at which the job script noticed the end of the previous attempt in this allocation.
        ended: end of `megarl train`.
    """

    job: str
    restart: int
    allocated: float
    began: float
    saved: int
    submitted: float = 0.0
    nodes: int = 0
    noticed: float = 0.0
    ended: float = 0.0


class Attempts:
    """The recorded attempts of a run, given its run folder `run`."""

    def __init__(self, run: Path):
        self._folder = run / LAUNCH / ATTEMPTS

    def begin(self, attempt: Attempt) -> Path:
        """Record the start of an attempt and return its file. The caller touches the file as a heartbeat."""
        self._folder.mkdir(exist_ok=True)
        file = self._folder / str(max(numbered(self._folder, "{}"), default=0) + 1)
        replace_text(file, json.dumps(asdict(attempt)))
        return file

    def end(self, file: Path, attempt: Attempt) -> None:
        """Record the end of an attempt in its file. The user may have deleted the run folder's files."""
        with suppress(OSError):
            replace_text(file, json.dumps(asdict(attempt)))

    def readable(self) -> list[tuple[Attempt, float]]:
        """Return the attempts as `all` does, but omit damaged records."""
        found = []
        for file in numbered(self._folder, "{}").values():
            with suppress(UserError, OSError):
                found.append((read_record(file, Attempt), file.stat().st_mtime))
        return found

    def all(self) -> list[tuple[Attempt, float]]:
        """Return all attempts, each with the Unix timestamp of its last heartbeat."""
        files = numbered(self._folder, "{}").values()
        return [(read_record(file, Attempt), file.stat().st_mtime) for file in files]

    def without_progress(self, step: int, job: str) -> list[Attempt]:
        """Return the job's most recent consecutive attempts that started from the checkpoint of `step`, newest first.
        If that checkpoint is still the newest one, none of these attempts has made progress."""
        attempts = [attempt for attempt, _ in self.all() if attempt.job == job]
        return list(takewhile(lambda attempt: attempt.saved == step, reversed(attempts)))
