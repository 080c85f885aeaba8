"""The ledger of samples: one line per step that proves which samples trained which weights; see megarl.run.audit.

The file is append-only, and each line is on disk before the run proceeds. A line ends with a hash of its content and of
the previous line's hash. An attempt that resumes from an earlier step does not remove lines: it appends a line `back`,
after which the lines of later steps no longer count.

    run          the run begins after this step: 0, or the step of another run's checkpoint
    back         the run continues after an earlier step, in a new timeline
    refit        the engines received weights without an update, at the start of an attempt
    step         rows drawn, trained on, left out and dropped, and the weights after the update
    evaluation   evaluation sets that were sampled after a step
    checkpoint   a checkpoint of a step is complete, except for its final name
    end          the run finished
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megarl.config.schema import Config
from megarl.core.checkpoint import Checkpoint
from megarl.core.errors import UserError
from megarl.core.files import open_regular, retry_when_full, sync
from megarl.data.cursor import PromptCursor
from megarl.run.audit.chain import START, recorded_hash, sealed
from megarl.run.audit.history import FORMAT
from megarl.step.record import Record
from megarl.step.state import RunState


@dataclass(slots=True)
class SampleLedger:
    """Appends lines to a run's ledger. Only the driver process writes to it."""

    path: Path
    _hash: str = field(init=False, default=START)
    _timeline: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        """Continue the file, if it exists. A killed run may have left a partial last line, which is removed."""
        if not os.path.lexists(self.path):
            return
        line = _last_line(self.path)
        if not line:
            return
        found, content = recorded_hash(line), None
        with suppress(ValueError):
            content = json.loads(line)
        if found is None or not isinstance(content, dict) or not isinstance(content.get("timeline"), int):
            raise UserError(
                f"{self.path}: its last line is damaged. Fix: move the file away. The ledger then begins at the step "
                "after which the run resumes"
            )
        self._hash, self._timeline = found, content["timeline"]

    def begin(
        self,
        config: Config,
        state: RunState,
        attempt: int,
        data_hash: str,
        checkpoint: Checkpoint | None,
        continues: bool,
    ) -> None:
        """Record the start of an attempt, which continues after `state.step` from `checkpoint`, if any. `continues`:
        whether the checkpoint belongs to this run. If not, earlier lines in the file no longer count."""
        pending = sorted(state.pending, key=lambda item: item.draw)
        cursor = state.cursor.state()
        settings = {
            "cause": f"attempt {attempt} starts" + ("" if checkpoint is None else f" from {checkpoint.path}"),
            "attempt": attempt,
            "checkpoint": None if checkpoint is None else checkpoint.digest,
            "num_draws": state.num_draws,
            "pending": {"draw": [item.draw for item in pending], "row": [item.row for item in pending]},
            "prompts_per_step": config.batch.prompts_per_step,
            "max_staleness": None if config.is_offline else config.rollout.max_staleness,
            "data": {
                "hash": data_hash,
                "rows": cursor["num_prompts"],
                "seed": cursor["seed"],
                "shuffle": config.data.shuffle if isinstance(state.cursor, PromptCursor) else None,
            },
        }
        if continues and self._hash != START:
            self._back(state.step, settings)
            return
        self._timeline += self._hash != START
        self._append("run", state.step, {"format": FORMAT, **settings})
        sync(self.path.parent)

    def back(self, step: int, cause: str) -> None:
        """Record that the current attempt continues after `step`, in a new timeline. Later steps and checkpoints no
        longer count. Call it before any of these steps runs again, and `refit` before the next step."""
        self._back(step, {"cause": cause})

    def _back(self, step: int, content: Mapping[str, Any]) -> None:
        self._timeline += 1
        self._append("back", step, content)

    def refit(self, step: int, weights: Mapping[str, Any]) -> None:
        """Record a refit with the weights after `step`, other than the step's own refit."""
        self._append("refit", step, {"weights": weights})

    def step(self, step: int, record: Record, weights: Mapping[str, Any] | None = None) -> None:
        """Record a finished step. weights: the checksums in its refit; None if it has no refit."""
        self._append("step", step, {**record, "weights": weights or {}})

    def evaluation(self, step: int, sets: Sequence[Mapping[str, Any]]) -> None:
        self._append("evaluation", step, {"sets": sets})

    def checkpoint(self, checkpoint: Checkpoint) -> None:
        """Record a checkpoint. Call it before the checkpoint gets its final name."""
        self._append("checkpoint", checkpoint.step, {"checkpoint": checkpoint.digest})

    def end(self, step: int) -> None:
        self._append("end", step, {})

    def _append(self, kind: str, step: int, content: Mapping[str, Any]) -> None:
        fields = {"kind": kind, "step": step, "timeline": self._timeline, "time": round(time.time(), 3), **content}
        self._hash, line = sealed(self._hash, fields)
        retry_when_full(lambda: _append_durably(self.path, line), self.path)


def _append_durably(path: Path, line: bytes) -> None:
    """Append a line and flush it to disk, or leave the file unchanged if OSError is raised."""
    with path.open("ab", buffering=0) as file:
        size = file.seek(0, os.SEEK_END)
        try:
            left = memoryview(line)
            while left:
                left = left[file.write(left) or 0 :]
            os.fsync(file.fileno())
        except OSError:
            with suppress(OSError):
                file.truncate(size)
            raise


def _last_line(path: Path) -> bytes:
    """Remove a partial last line from the file and return the last complete line; empty if there is none."""
    with open_regular(path) as file:
        content_end = end = file.seek(0, os.SEEK_END)
        tail = b""
        while end and tail.count(b"\n") < 2:
            start = max(0, end - 2**16)
            file.seek(start)
            tail, end = file.read(end - start) + tail, start
    complete = tail[: tail.rfind(b"\n") + 1]
    if len(complete) < len(tail):
        os.truncate(path, content_end - len(tail) + len(complete))
    return complete[complete.rfind(b"\n", 0, -1) + 1 :]
