"""The checkpoints of a run on disk. Each is a folder that is complete from the moment it has its name.

    checkpoints/step_000020/manifest.json   the driver's state, and size and SHA-256 of every other file
    checkpoints/step_000020/actor/…         what the trainer ranks wrote
    checkpoints/latest                      the name of the newest one
    checkpoints/.step_000030/               one that is being written, or was when the run was killed

Files are written in the hidden folder and fsynced, then it gets its name, then `latest` is pointed to it, then older
ones are removed. So a run that is killed at any moment has the checkpoint that `latest` names.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megarl.new_folder import sync
from megarl.numbered import number_in, numbered

MANIFEST = "manifest.json"
POINTER = "latest"
PREFIX = "step_"
NAME = PREFIX + "{:06d}"


@dataclass(frozen=True, slots=True)
class FileRecord:
    """A file of a checkpoint; path is relative to the checkpoint's folder."""

    path: str
    num_bytes: int
    sha256: str


def seal(file: Path, checkpoint: Path) -> FileRecord:
    """Waits until the file is on the disk, and reads it back."""
    with file.open("rb") as stream:
        os.fsync(stream.fileno())
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
        return FileRecord(str(file.relative_to(checkpoint)), stream.tell(), digest)


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A complete checkpoint. state: what the driver needs to go on, as JSON."""

    path: Path
    step: int
    state: Mapping[str, Any]
    files: tuple[FileRecord, ...]

    @classmethod
    def open(cls, path: Path) -> Checkpoint:
        """Raises ValueError that names what is missing or damaged, as far as sizes tell, and the checkpoint before."""
        try:
            manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
            content = manifest["content"]
            intact = manifest["sha256"] == _digest(content)
        except FileNotFoundError:
            raise ValueError(f"{path}: {MANIFEST} is missing; {_remedy(path)}") from None
        except (ValueError, KeyError, TypeError):
            intact = False
        if not intact:
            raise ValueError(f"{path}: {MANIFEST} is damaged; {_remedy(path)}")
        files = tuple(FileRecord(**record) for record in content["files"])
        checkpoint = cls(path, content["step"], content["state"], files)
        for record in files:
            checkpoint._check_size(record)
        return checkpoint

    @property
    def num_bytes(self) -> int:
        return sum(record.num_bytes for record in self.files)

    def verify(self, files: Iterable[FileRecord]) -> None:
        """Reads these files of it. Raises ValueError that names the first one that is not what was written."""
        for record in files:
            self._check_size(record)
            with (self.path / record.path).open("rb") as stream:
                digest = hashlib.file_digest(stream, "sha256").hexdigest()
            if digest != record.sha256:
                raise ValueError(
                    f"{self.path}: {record.path} is damaged: its SHA-256 is {digest[:8]}… and was "
                    f"{record.sha256[:8]}…; {_remedy(self.path)}"
                )

    def _check_size(self, record: FileRecord) -> None:
        file = self.path / record.path
        if not file.exists():
            raise ValueError(f"{self.path}: {record.path} is missing; {_remedy(self.path)}")
        if (size := file.stat().st_size) != record.num_bytes:
            raise ValueError(
                f"{self.path}: {record.path} is damaged: it has {size:,} bytes and had {record.num_bytes:,}; "
                f"{_remedy(self.path)}"
            )


def is_checkpoint(folder: Path) -> bool:
    """Whether the folder is one, whole or damaged: other folders, a run's own too, may have files of that name."""
    try:
        return "content" in json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return False
    except ValueError:
        return True


class Checkpoints:
    """The folder of a run's checkpoints. One process, the driver, changes it."""

    def __init__(self, path: Path):
        self.path = path

    def __len__(self) -> int:
        return len(self.steps())

    def steps(self) -> list[int]:
        """Of those that are complete, ascending."""
        return list(numbered(self.path, NAME))

    def latest(self) -> Path | None:
        """The checkpoint that is pointed to; None before the first one."""
        pointer = self.path / POINTER
        return self.path / pointer.read_text(encoding="utf-8").strip() if pointer.exists() else None

    def require_space(self, num_bytes: int, keep: int, number: int = 1) -> None:
        """Raises ValueError where the disk has no room for so many checkpoints of num_bytes each. keep: the value of
        checkpoint.keep, for the message."""
        free = shutil.disk_usage(next(path for path in (self.path, *self.path.parents) if path.exists())).free
        if free < number * num_bytes:
            raise ValueError(
                f"checkpoint.keep={keep}: {self.path} has {free / 1e9:.2f} GB free, and {number} more "
                f"{'checkpoint needs' if number == 1 else 'checkpoints need'} {number} x {num_bytes / 1e9:.2f} = "
                f"{number * num_bytes / 1e9:.2f} GB (one is written before the oldest is removed); free some there, "
                "lower checkpoint.keep, or set checkpoint.every_steps=null"
            )

    def begin(self, step: int) -> Path:
        """An empty folder to write the checkpoint of `step` into."""
        self.path.mkdir(parents=True, exist_ok=True)
        self.sweep()
        folder = self._hidden(step)
        folder.mkdir()
        return folder

    def commit(self, step: int, state: Mapping[str, Any], files: Iterable[FileRecord]) -> Checkpoint:
        """Makes a checkpoint of what was written for `step`, and points to it.

        files: all that were written, already on the disk.
        """
        hidden, final = self._hidden(step), self._named(step)
        assert final != self.latest(), f"{final} exists and is pointed to"
        content = {"step": step, "state": state, "files": [asdict(record) for record in files]}
        _write(hidden / MANIFEST, json.dumps({"sha256": _digest(content), "content": content}, indent=1) + "\n")
        for folder in {hidden, *(path for path in hidden.rglob("*") if path.is_dir())}:
            sync(folder)
        Checkpoint.open(hidden)
        # There is one of that name where a run was killed before it could point to it.
        self._remove(final)
        hidden.rename(final)
        sync(self.path)
        self.point_to(final)
        return Checkpoint.open(final)

    def point_to(self, checkpoint: Path) -> None:
        new = self.path / f".{POINTER}"
        _write(new, f"{checkpoint.name}\n")
        new.replace(self.path / POINTER)
        sync(self.path)

    def keep(self, number: int) -> None:
        """Removes all but the newest ones; never the one that is pointed to, nor a later one."""
        steps = [step for step in self.steps() if self._named(step) != self.latest()]
        for step in steps[: max(0, len(steps) + 1 - number)]:
            self._remove(self._named(step))

    def go_back_to(self, step: int) -> None:
        """Points to the checkpoint of `step`, and removes those after it."""
        self.point_to(self._named(step))
        for later in [other for other in self.steps() if other > step]:
            self._remove(self._named(later))

    def sweep(self) -> None:
        """Removes what was being written, or removed, when its run was killed."""
        for leftover in self.path.glob(f".{PREFIX}*"):
            shutil.rmtree(leftover)

    def _remove(self, checkpoint: Path) -> None:
        """Takes its name away first: what has a name is whole."""
        if checkpoint.exists():
            hidden = checkpoint.with_name(f".{checkpoint.name}.removed")
            shutil.rmtree(hidden, ignore_errors=True)
            checkpoint.rename(hidden)
            shutil.rmtree(hidden)

    def _hidden(self, step: int) -> Path:
        return self.path / f".{NAME.format(step)}"

    def _named(self, step: int) -> Path:
        return self.path / NAME.format(step)


def _remedy(checkpoint: Path) -> str:
    step = number_in(checkpoint.name.removeprefix("."), NAME) or 0
    earlier = [path for other, path in numbered(checkpoint.parent, NAME).items() if other < step]
    if not earlier:
        return "there is no earlier one; start anew with resume=never"
    return f"go on from the one before it: resume={earlier[-1]}"


def _digest(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _write(file: Path, text: str) -> None:
    with file.open("w", encoding="utf-8") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())
