"""One checkpoint on disk: a folder whose manifest has the driver's state, and size and SHA-256 of all other files."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from megarl.core.errors import UserError
from megarl.core.files import number_in, numbered

MANIFEST = "manifest.json"
PREFIX = "step_"
NAME = PREFIX + "{:06d}"
NOTE = "__{}.written"
"""The name of the note that a rank has written its files: it begins as Megatron's names of a rank's files do."""

FORMAT = 7
"""The version of what a manifest holds. It grows by one with keys of the config that an earlier save does not have; the
values that they then have are in megarl.config.saved. A manifest of version 1 does not name it."""


@dataclass(frozen=True, slots=True)
class FileRecord:
    """A file of a checkpoint; path is relative to the checkpoint's folder."""

    path: str
    num_bytes: int
    sha256: str

    @property
    def rank(self) -> int:
        """The rank that wrote it, by Megatron's names of a rank's files; 0 wrote those of all ranks."""
        found = re.match(r"__(\d+)_", Path(self.path).name)
        return 0 if found is None else int(found[1])


def seal(file: Path, checkpoint: Path) -> FileRecord:
    """Waits until the file is on the disk, and returns its record, read back from there."""
    with file.open("rb") as stream:
        os.fsync(stream.fileno())
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
        return FileRecord(str(file.relative_to(checkpoint)), stream.tell(), digest)


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A complete checkpoint.

    state    the driver's state, from which a run goes on, as JSON values
    format   the version of its manifest
    """

    path: Path
    step: int
    state: Mapping[str, Any]
    files: tuple[FileRecord, ...]
    format: int

    @classmethod
    def open(cls, path: Path) -> Checkpoint:
        """Reads a checkpoint's manifest. Raises UserError that names what is missing or damaged, as far as sizes tell,
        and the checkpoint before."""
        try:
            manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
            content = manifest["content"]
            intact = manifest["sha256"] == _digest(content)
        except FileNotFoundError:
            raise UserError(f"{path}: {MANIFEST} is missing; {_remedy(path)}") from None
        except (ValueError, KeyError, TypeError):
            intact = False
        if not intact:
            raise UserError(f"{path}: {MANIFEST} is damaged; {_remedy(path)}")
        if (version := content.get("format", 1)) > FORMAT:
            raise UserError(
                f"{path}: a later megarl saved it, in format {version}; this one reads up to {FORMAT}: update megarl"
            )
        files = tuple(FileRecord(**record) for record in content["files"])
        checkpoint = cls(path, content["step"], content["state"], files, version)
        for record in files:
            checkpoint._check_size(record)
        return checkpoint

    @property
    def num_bytes(self) -> int:
        return sum(record.num_bytes for record in self.files)

    def verify(self, files: Iterable[FileRecord]) -> None:
        """Reads these files of the checkpoint. Raises UserError that names the first that differs from what was
        written."""
        for record in files:
            self._check_size(record)
            with (self.path / record.path).open("rb") as stream:
                digest = hashlib.file_digest(stream, "sha256").hexdigest()
            if digest != record.sha256:
                raise UserError(
                    f"{self.path}: {record.path} is damaged: its SHA-256 is {digest[:8]}… and was "
                    f"{record.sha256[:8]}…; {_remedy(self.path)}"
                )

    def _check_size(self, record: FileRecord) -> None:
        file = self.path / record.path
        if not file.exists():
            raise UserError(f"{self.path}: {record.path} is missing; {_remedy(self.path)}")
        if (size := file.stat().st_size) != record.num_bytes:
            raise UserError(
                f"{self.path}: {record.path} is damaged: it has {size:,} bytes and had {record.num_bytes:,}; "
                f"{_remedy(self.path)}"
            )


def write_note(folder: Path, rank: int, files: Iterable[FileRecord]) -> None:
    """Notes in the folder that these files of a rank are written. The note is no file of the checkpoint."""
    note = folder / NOTE.format(rank)
    new = note.with_suffix(".new")
    new.write_text(json.dumps([asdict(record) for record in files]), encoding="utf-8")
    new.replace(note)


def noted_files(checkpoint: Path, folder: str, num_ranks: int) -> list[FileRecord] | None:
    """Returns the files that the ranks have noted in a folder of the checkpoint; None as long as one has not."""
    notes = [checkpoint / folder / NOTE.format(rank) for rank in range(num_ranks)]
    if not all(note.exists() for note in notes):
        return None
    records = [FileRecord(**record) for note in notes for record in json.loads(note.read_text(encoding="utf-8"))]
    return [replace(record, path=f"{folder}/{record.path}") for record in records]


def remove_notes(checkpoint: Path) -> None:
    for note in checkpoint.glob(f"*/{NOTE.format('*')}"):
        note.unlink()


def is_checkpoint(folder: Path) -> bool:
    """Returns whether the folder is a checkpoint, whole or damaged: other folders, a run's too, may have a file of the
    manifest's name."""
    try:
        return "content" in json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return False
    except ValueError:
        return True


def write_manifest(folder: Path, step: int, state: Mapping[str, Any], files: Iterable[FileRecord]) -> None:
    """Makes a checkpoint of a folder, for `Checkpoint.open` to read. files: all files in it, already on the disk."""
    content = {"format": FORMAT, "step": step, "state": state, "files": [asdict(record) for record in files]}
    write_synced(folder / MANIFEST, json.dumps({"sha256": _digest(content), "content": content}, indent=1) + "\n")


def _remedy(checkpoint: Path) -> str:
    step = number_in(checkpoint.name.removeprefix("."), NAME) or 0
    earlier = [path for other, path in numbered(checkpoint.parent, NAME).items() if other < step]
    if not earlier:
        return "there is no earlier one; start anew with resume=never run.replace=true"
    return f"go on from the one before it: resume={earlier[-1]}"


def _digest(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def write_synced(file: Path, text: str) -> None:
    """Writes the text, and waits until it is on the disk."""
    with file.open("w", encoding="utf-8") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())
