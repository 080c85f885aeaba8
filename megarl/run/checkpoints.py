"""Stores a run's checkpoints on disk. A checkpoint is complete once its folder has its final name.

    checkpoints/step_000020/manifest.json   driver state, and the size and SHA-256 of each of the remaining files
    checkpoints/step_000020/actor/…         files written by the actor's ranks
    checkpoints/step_000020/rollouts/…      queued samples, if any
    checkpoints/latest                      name of the newest checkpoint
    checkpoints/best                        name of the checkpoint with the best evaluation result (evaluation.best)
    checkpoints/.step_000030/               an incomplete checkpoint, in progress or left by a killed run

Files are written to the hidden folder and fsynced. Then the folder is renamed, `latest` is updated, and old checkpoints
are removed, in this order. If the run is killed at any point, the checkpoint that `latest` names remains valid.
"""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from megarl.core.checkpoint import NAME, PREFIX, Checkpoint, FileRecord, remove_notes, write_manifest, write_synced
from megarl.core.errors import InfrastructureFailure, UserError
from megarl.core.files import DISK_S, number_in, numbered, read_text, sync
from megarl.core.outage import pauses

POINTER, BEST = "latest", "best"
MAX_NAME = 255


class Checkpoints:
    """The checkpoint folder of a run. Only the driver process modifies it."""

    def __init__(self, path: Path):
        self.path = path

    def __len__(self) -> int:
        return len(self.steps())

    def steps(self) -> list[int]:
        """Return the steps of the complete checkpoints in ascending order."""
        return list(numbered(self.path, NAME))

    def latest(self) -> Path | None:
        """Return the checkpoint to which `latest` points, or None if no checkpoint is complete. Raise UserError if it
        does not contain a checkpoint's name."""
        return self.pointed_to(POINTER)

    def best(self) -> Path | None:
        """Return the checkpoint to which `best` points, or None if the pointer does not exist."""
        return self.pointed_to(BEST)

    def pointed_to(self, name: str) -> Path | None:
        """Return the checkpoint that a pointer names, or None if the pointer does not exist. Raise the same
        errors as `latest`."""
        pointer = self.path / name
        if not os.path.lexists(pointer):
            return None
        target = read_text(pointer).strip()
        if len(target) > MAX_NAME or number_in(target, NAME) is None:
            newest = f"such as {self._named(self.steps()[-1]).name}" if self.steps() else "or remove the file"
            raise UserError(
                f"{pointer}: {target[:40]!r} is not the name of a checkpoint. Fix: write a checkpoint's name to it, "
                f"{newest}"
            )
        return self.path / target

    def require_space(self, num_bytes: int, keep: int, number: int = 1) -> None:
        """Raise an error that names checkpoint.keep if the disk has no space for `number` more checkpoints. It is an
        InfrastructureFailure if a checkpoint was saved but the disk has since filled up, so that not even one more
        fits. Otherwise it is a UserError."""
        free = shutil.disk_usage(next(path for path in (self.path, *self.path.parents) if path.exists())).free
        if free < number * num_bytes:
            raise (InfrastructureFailure if len(self) and free < num_bytes else UserError)(
                f"checkpoint.keep={keep}: {self.path} has {free / 1e9:.2f} GB free, but {number} more "
                f"{'checkpoint needs' if number == 1 else 'checkpoints need'} {number} x {num_bytes / 1e9:.2f} = "
                f"{number * num_bytes / 1e9:.2f} GB (megarl writes a new one before it removes the oldest). Fix: free "
                "disk space, lower checkpoint.keep, or set checkpoint.every_steps=null and checkpoint.on_signal=false"
            )

    def await_space(self, num_bytes: int, keep: int) -> None:
        """Wait up to DISK_S seconds until the disk has space for another checkpoint, or raise InfrastructureFailure."""
        for number, pause in enumerate((*pauses(DISK_S), None)):
            try:
                return self.require_space(num_bytes, keep)
            except (UserError, InfrastructureFailure) as error:
                if pause is None:
                    raise InfrastructureFailure(str(error)) from None
                if number == 0:
                    line = f"megarl: warning: waiting up to {DISK_S:g} s for disk space. {error}"
                    print(line, file=sys.stderr, flush=True)
            time.sleep(pause)

    def begin(self, step: int) -> Path:
        """Create an empty hidden folder for the checkpoint of `step`."""
        self.path.mkdir(parents=True, exist_ok=True)
        self.sweep()
        folder = self._hidden(step)
        folder.mkdir()
        return folder

    def commit(
        self,
        step: int,
        state: Mapping[str, Any],
        files: Iterable[FileRecord],
        sealed: Callable[[Checkpoint], object] = lambda _: None,
    ) -> Checkpoint:
        """Complete the checkpoint of `step`: write its manifest, rename its hidden folder, and point `latest` to it.
        All `files` must already be on disk. `sealed` receives the checkpoint before its folder gets its final name."""
        hidden, final = self._hidden(step), self._named(step)
        assert final != self.latest(), f"{final} already exists and is the latest checkpoint"
        write_manifest(hidden, step, state, files)
        for folder in {hidden, *(path for path in hidden.rglob("*") if path.is_dir())}:
            sync(folder)
        sealed(Checkpoint.open(hidden))
        # An earlier attempt may have been killed after it renamed this checkpoint and before it updated `latest`.
        self._remove(final)
        remove_notes(hidden)
        hidden.rename(final)
        sync(self.path)
        self.point_to(final)
        return Checkpoint.open(final)

    def point_to(self, checkpoint: Path, pointer: str = POINTER) -> None:
        new = self.path / f".{pointer}"
        write_synced(new, f"{checkpoint.name}\n")
        new.replace(self.path / pointer)
        sync(self.path)

    def point_to_best(self, step: int | None) -> None:
        """Point `best` to the checkpoint of `step`, or remove the pointer if `step` is None."""
        if step is None:
            (self.path / BEST).unlink(missing_ok=True)
        elif self._named(step) != self.best():
            self.point_to(self._named(step), BEST)

    def keep(self, number: int) -> None:
        """Remove all checkpoints except for the newest `number`. The targets of `latest` and `best` are always kept."""
        steps = [step for step in self.steps() if self._named(step) != self.latest()]
        for step in steps[: max(0, len(steps) + 1 - number)]:
            if self._named(step) != self.best():
                self._remove(self._named(step))

    def roll_back_to(self, step: int) -> None:
        """Point `latest` to the checkpoint of `step` and remove later ones."""
        self.point_to(self._named(step))
        for later in [other for other in self.steps() if other > step]:
            self._remove(self._named(later))

    def set_aside(self, checkpoint: Path, earlier: Path) -> Path:
        """Rename a damaged checkpoint, and point `latest` to an earlier one. Return the new path."""
        aside = checkpoint.with_name(f"{checkpoint.name}.damaged")
        shutil.rmtree(aside, ignore_errors=True)
        if checkpoint == self.best():
            (self.path / BEST).unlink()
        self.point_to(earlier)
        if checkpoint.exists():
            checkpoint.rename(aside)
        return aside

    def sweep(self) -> None:
        """Remove checkpoints that a killed run has written or removed only partially. On NFS, a folder cannot be
        removed while a process holds one of its files open; a later save removes it."""
        for leftover in self.path.glob(f".{PREFIX}*"):
            shutil.rmtree(leftover, ignore_errors=True)

    def _remove(self, checkpoint: Path) -> None:
        """Remove a checkpoint. Its folder is renamed first, so that folders with a checkpoint's name are complete."""
        if checkpoint.exists():
            hidden = checkpoint.with_name(f".{checkpoint.name}.removed")
            shutil.rmtree(hidden, ignore_errors=True)
            checkpoint.rename(hidden)
            shutil.rmtree(hidden, ignore_errors=True)  # see `sweep`

    def _hidden(self, step: int) -> Path:
        return self.path / f".{NAME.format(step)}"

    def _named(self, step: int) -> Path:
        return self.path / NAME.format(step)
