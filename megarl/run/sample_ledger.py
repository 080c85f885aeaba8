"""The sample ledger: one line per step that proves which samples trained which weights; see megarl.run.audit.

The file is append-only, and each line is on disk before the run proceeds. A line ends with a hash of its content and of
the previous line's hash. An attempt that resumes from an earlier step does not remove lines: it appends a line `back`,
and the lines of later steps no longer count.

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
from megarl.core.files import is_plain, open_regular, retry_when_full, sync
from megarl.run.audit.chain import START, recorded_hash, sealed
from megarl.run.audit.history import FORMAT
from megarl.step.record import Record
from megarl.step.state import RunState


@dataclass(slots=True)
class SampleLedger:
    """Appends lines to a run's ledger. Only the driver process writes to it."""

    path: Path
    _end: tuple[str, int, int] = field(init=False, default=(START, 0, -1))
    """Hash of the last complete line, the offset of its end in the file, and its timeline. After an interrupted write,
    a partial line may follow."""

    def __post_init__(self) -> None:
        """Append to the file if it exists. A killed run may have left a partial last line."""
        line, size = _last_line(self.path) if os.path.lexists(self.path) else (b"", 0)
        if not line:
            return
        found, content = recorded_hash(line), None
        with suppress(ValueError):
            content = json.loads(line)
        if found is None or not isinstance(content, dict) or not is_plain(content.get("timeline"), int):
            raise UserError(
                f"{self.path}: the last line is damaged. Fix: move or delete the file. A new ledger then starts at the "
                "step from which the run resumes"
            )
        self._end = found, size, content["timeline"]

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
        cursor: Mapping[str, Any] = {**state.cursor.state()}
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
                "shuffle": cursor.get("shuffle"),  # None if rows are drawn by weight
            },
        }
        if continues and self._end[0] != START:
            self._append("back", state.step, settings)
            return
        self._append("run", state.step, {"format": FORMAT, **settings})
        sync(self.path.parent)

    def refit(self, step: int, weights: Mapping[str, Any]) -> None:
        """Record the first refit of an attempt, with the weights after `step`."""
        self._append("refit", step, {"weights": weights})

    def step(self, step: int, record: Record, weights: Mapping[str, Any] | None = None) -> None:
        """Record a finished step. weights: the checksums in its refit; None if it has no refit."""
        self._append("step", step, {**record, "weights": weights or {}})

    def evaluation(self, step: int, sets: Sequence[Mapping[str, Any]]) -> None:
        """Record the evaluation sets that were sampled after a step."""
        self._append("evaluation", step, {"sets": sets})

    def checkpoint(self, checkpoint: Checkpoint) -> None:
        """Record a checkpoint. Call it before the checkpoint gets its final name."""
        self._append("checkpoint", checkpoint.step, {"checkpoint": checkpoint.digest})

    def end(self, step: int) -> None:
        """Record that the run finished after `step`."""
        self._append("end", step, {})

    def _append(self, kind: str, step: int, content: Mapping[str, Any]) -> None:
        previous, size, timeline = self._end
        timeline += kind in ("run", "back")
        fields = {"kind": kind, "step": step, "timeline": timeline, "time": round(time.time(), 3), **content}
        digest, line = sealed(previous, fields)
        retry_when_full(lambda: _write_durably(self.path, size, line), self.path)
        self._end = digest, size + len(line), timeline  # one assignment, because a signal may interrupt this method


def _write_durably(path: Path, size: int, line: bytes) -> None:
    """Write a line after the first `size` bytes of the file, and flush it to disk."""
    with path.open("ab", buffering=0) as file:
        file.truncate(size)
        left = memoryview(line)
        while left:
            left = left[file.write(left) or 0 :]
        os.fsync(file.fileno())


def _last_line(path: Path) -> tuple[bytes, int]:
    """Return the last complete line, and the size of the file up to its end. The line is empty if there is none."""
    with open_regular(path) as file:
        size = start = file.seek(0, os.SEEK_END)
        tail = b""
        while start and tail.count(b"\n") < 2:
            stop, start = start, max(0, start - 2**16)
            file.seek(start)
            tail = file.read(stop - start) + tail
    complete = tail[: tail.rfind(b"\n") + 1]
    return complete[complete.rfind(b"\n", 0, -1) + 1 :], size - len(tail) + len(complete)
