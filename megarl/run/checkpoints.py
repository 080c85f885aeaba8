"""The checkpoints of a run on disk. Each is a folder that is complete from the moment it has its name.

    checkpoints/step_000020/manifest.json   the driver's state, and size and SHA-256 of every other file
    checkpoints/step_000020/actor/…         what the trainer ranks wrote
    checkpoints/step_000020/rollouts/…      the samples that waited for a step, if there were some
    checkpoints/latest                      the name of the newest one
    checkpoints/best                        the name of that with the best evaluation (evaluation.best)
    checkpoints/.step_000030/               one that is being written, or was when the run was killed

Files are written in the hidden folder and fsynced, then it gets its name, then `latest` is pointed to it, then older
ones are removed. So a run that is killed at any moment has the checkpoint that `latest` names.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from megarl.core.checkpoint import NAME, PREFIX, Checkpoint, FileRecord, remove_notes, write_manifest, write_synced
from megarl.core.errors import UserError
from megarl.core.files import numbered, sync

POINTER, BEST = "latest", "best"


class Checkpoints:
    """The folder of a run's checkpoints. One process, the driver, changes it."""

    def __init__(self, path: Path):
        self.path = path

    def __len__(self) -> int:
        return len(self.steps())

    def steps(self) -> list[int]:
        """Return the steps of the complete checkpoints, ascending."""
        return list(numbered(self.path, NAME))

    def latest(self) -> Path | None:
        """Return the checkpoint that `latest` names; None before the first one."""
        return self._pointed_to(POINTER)

    def best(self) -> Path | None:
        """Return the checkpoint that `best` names; None before there is one."""
        return self._pointed_to(BEST)

    def _pointed_to(self, name: str) -> Path | None:
        pointer = self.path / name
        return self.path / pointer.read_text(encoding="utf-8").strip() if pointer.exists() else None

    def require_space(self, num_bytes: int, keep: int, number: int = 1) -> None:
        """Raise UserError where the disk has no room for so many checkpoints of num_bytes each. keep: the value of
        checkpoint.keep, for the message."""
        free = shutil.disk_usage(next(path for path in (self.path, *self.path.parents) if path.exists())).free
        if free < number * num_bytes:
            raise UserError(
                f"checkpoint.keep={keep}: {self.path} has {free / 1e9:.2f} GB free, and {number} more "
                f"{'checkpoint needs' if number == 1 else 'checkpoints need'} {number} x {num_bytes / 1e9:.2f} = "
                f"{number * num_bytes / 1e9:.2f} GB (one is written before the oldest is removed); free some there, "
                "lower checkpoint.keep, or set checkpoint.every_steps=null and checkpoint.on_signal=false"
            )

    def begin(self, step: int) -> Path:
        """Make an empty folder to write the checkpoint of `step` into."""
        self.path.mkdir(parents=True, exist_ok=True)
        self.sweep()
        folder = self._hidden(step)
        folder.mkdir()
        return folder

    def commit(self, step: int, state: Mapping[str, Any], files: Iterable[FileRecord]) -> Checkpoint:
        """Make a checkpoint of what was written for `step`, and points to it.

        files: all files that were written, already on the disk.
        """
        hidden, final = self._hidden(step), self._named(step)
        assert final != self.latest(), f"{final} exists and is pointed to"
        write_manifest(hidden, step, state, files)
        for folder in {hidden, *(path for path in hidden.rglob("*") if path.is_dir())}:
            sync(folder)
        Checkpoint.open(hidden)
        # A checkpoint of that name exists where a run was killed before it could point to it.
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
        """Point `best` to the checkpoint of this step; None: to none."""
        if step is None:
            (self.path / BEST).unlink(missing_ok=True)
        elif self._named(step) != self.best():
            self.point_to(self._named(step), BEST)

    def keep(self, number: int) -> None:
        """Remove all but the newest `number` checkpoints; never one that is pointed to, nor one later than `latest`.
        That which `best` names is kept beside the newest."""
        steps = [step for step in self.steps() if self._named(step) != self.latest()]
        for step in steps[: max(0, len(steps) + 1 - number)]:
            if self._named(step) != self.best():
                self._remove(self._named(step))

    def go_back_to(self, step: int) -> None:
        """Point to the checkpoint of `step`, and removes those after it."""
        self.point_to(self._named(step))
        for later in [other for other in self.steps() if other > step]:
            self._remove(self._named(later))

    def sweep(self) -> None:
        """Remove what was being written, or removed, when its run was killed."""
        for leftover in self.path.glob(f".{PREFIX}*"):
            shutil.rmtree(leftover)

    def _remove(self, checkpoint: Path) -> None:
        """Remove a checkpoint. It loses its name first, because a folder with a checkpoint's name is complete."""
        if checkpoint.exists():
            hidden = checkpoint.with_name(f".{checkpoint.name}.removed")
            shutil.rmtree(hidden, ignore_errors=True)
            checkpoint.rename(hidden)
            shutil.rmtree(hidden)

    def _hidden(self, step: int) -> Path:
        return self.path / f".{NAME.format(step)}"

    def _named(self, step: int) -> Path:
        return self.path / NAME.format(step)
