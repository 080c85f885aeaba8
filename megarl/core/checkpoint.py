"""A checkpoint on disk: a folder whose manifest holds the driver's state and the size and SHA-256 of every other
file."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from megarl.core.errors import DamagedCheckpoint, UserError
from megarl.core.files import is_plain, number_in, numbered, parse_json, read_json, read_text, retry_when_full, shown

MANIFEST = "manifest.json"
PREFIX = "step_"
NAME = PREFIX + "{:06d}"
NOTE = "__{}.written"
"""File name of a rank's completion note. It has the same prefix as the files that Megatron writes for the rank."""

FORMAT = 1
"""Version of the manifest format. It increases when the config gains or loses keys; megarl.config.saved has the values
of added keys for older checkpoints."""

FORMAT_KEY = "format_version"
"""Manifest key for the format version. Pre-releases used a different key."""


@dataclass(frozen=True, slots=True)
class FileRecord:
    """One file in a checkpoint. `path` is relative to the checkpoint's folder."""

    path: str
    num_bytes: int
    sha256: str

    @property
    def rank(self) -> int:
        """The rank that wrote the file, parsed from Megatron's file name; 0 for files that are not specific to a
        rank."""
        match = re.match(r"__(\d+)_", Path(self.path).name)
        return 0 if match is None else int(match[1])


def seal(file: Path, checkpoint: Path) -> FileRecord:
    """Flush a file to disk and return its record. The digest is computed by reading the file back."""
    with file.open("rb") as stream:
        os.fsync(stream.fileno())
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
        return FileRecord(str(file.relative_to(checkpoint)), stream.tell(), digest)


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A complete checkpoint.

    Attributes:
        state: the driver's state, as JSON values; a run resumes from it.
        format: version of the manifest format.
        digest: SHA-256 of the manifest's content, including the SHA-256 of every other file.
    """

    path: Path
    step: int
    state: Mapping[str, Any]
    files: tuple[FileRecord, ...]
    format: int
    digest: str = ""

    @classmethod
    def open(cls, path: Path) -> Checkpoint:
        """Read a checkpoint's manifest and check the size of every file. Raise DamagedCheckpoint if a file is missing
        or has the wrong size. The message names the previous intact checkpoint."""
        try:
            return cls._read(path)
        except _Damage as damage:
            raise DamagedCheckpoint(f"{path}: {damage}. {_remedy(path)}") from None

    @classmethod
    def _read(cls, path: Path) -> Checkpoint:
        try:
            manifest = parse_json(read_text(path / MANIFEST))
            content = manifest["content"]
            if not isinstance(content, dict) or manifest["sha256"] != _digest(content):
                raise ValueError("the digest of the content differs")
        except FileNotFoundError:
            raise _Damage(f"{MANIFEST} is missing") from None
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            raise _Damage(f"{MANIFEST} is corrupt") from None
        version = checked_format(content, path)
        step, state, records = (content.get(key) for key in ("step", "state", "files"))
        if not is_plain(step, int) or step < 0:
            raise _Damage(f"{MANIFEST}: step={shown(step)} is not a nonnegative integer")
        if not isinstance(state, dict):
            raise _Damage(f"{MANIFEST}: state={shown(state)} is not an object")
        if not isinstance(records, list):
            raise _Damage(f"{MANIFEST}: files={shown(records)} is not a list")
        for record in records:
            if not _is_record(record):
                raise _Damage(
                    f"{MANIFEST}: files contains {shown(record)}, which does not describe a file in the folder"
                )
        files = tuple(FileRecord(**record) for record in records)
        checkpoint = cls(path, step, state, files, version, manifest["sha256"])
        for record in files:
            checkpoint._check_size(record)
        return checkpoint

    def malformed(self, key: str, value: Any, problem: str) -> DamagedCheckpoint:
        """Return the error for an invalid value in the manifest's state."""
        return DamagedCheckpoint(f"{self.path}: {MANIFEST}: {key}={shown(value)} {problem}. {_remedy(self.path)}")

    @property
    def num_bytes(self) -> int:
        return sum(record.num_bytes for record in self.files)

    def verify(self, files: Iterable[FileRecord]) -> None:
        """Check the SHA-256 of these files. Raise DamagedCheckpoint for the first file that differs from its record."""
        try:
            for record in files:
                self._check_size(record)
                with (self.path / record.path).open("rb") as stream:
                    digest = hashlib.file_digest(stream, "sha256").hexdigest()
                if digest != record.sha256:
                    raise _Damage(
                        f"{record.path} is corrupt: its SHA-256 is {digest[:8]}…, expected {record.sha256[:8]}…"
                    )
        except _Damage as damage:
            raise DamagedCheckpoint(f"{self.path}: {damage}. {_remedy(self.path)}") from None

    def _check_size(self, record: FileRecord) -> None:
        file = self.path / record.path
        if not os.path.isfile(file):  # unlike Path.is_file, returns False if the name is too long
            raise _Damage(f"{record.path} is missing")
        if (size := file.stat().st_size) != record.num_bytes:
            raise _Damage(f"{record.path} is corrupt: it has {size:,} bytes, expected {record.num_bytes:,}")


def _is_record(record: Any) -> bool:
    """Return whether a JSON value has the fields of a FileRecord for a file inside the checkpoint's folder."""
    kinds = {"path": str, "num_bytes": int, "sha256": str}
    if not isinstance(record, dict) or record.keys() != kinds.keys():
        return False
    if not all(is_plain(record[name], kind) for name, kind in kinds.items()) or "\0" in record["path"]:
        return False
    return not Path(record["path"]).is_absolute() and ".." not in Path(record["path"]).parts


class _Damage(Exception):
    """Raised with a description of a checkpoint's damage, without a remedy."""


def intact_before(checkpoint: Path) -> Path | None:
    """Return the newest earlier checkpoint whose files are complete, or None if there is none."""
    step = number_in(checkpoint.name.removeprefix("."), NAME) or 0
    for other, path in reversed(numbered(checkpoint.parent, NAME).items()):
        if other < step:
            with suppress(_Damage, UserError):
                return Checkpoint._read(path).path
    return None


def checked_format(manifest: Mapping[str, Any], path: Path) -> int:
    """Return a manifest's format version. Raise a UserError that names `path` if this version of megarl cannot read
    it."""
    version = manifest.get(FORMAT_KEY)
    if version is None:
        raise UserError(
            f"{path}: saved by a pre-release of megarl in a format that this version cannot read. Fix: start from "
            "scratch with another run.name"
        )
    if not is_plain(version, int) or version < 1:
        raise UserError(f"{path}: unknown format {shown(version)}. Fix: use a checkpoint that megarl saved")
    if version > FORMAT:
        raise UserError(
            f"{path}: saved by a later version of megarl in format {version}, but this version reads only formats up "
            f"to {FORMAT}. Fix: update megarl"
        )
    return version


def write_note(folder: Path, rank: int, files: Iterable[FileRecord]) -> None:
    """Record that a rank has written these files to the folder. The note is not part of the checkpoint."""
    note = folder / NOTE.format(rank)
    new = note.with_suffix(".new")
    write_synced(new, json.dumps([asdict(record) for record in files]))
    new.replace(note)


def noted_files(checkpoint: Path, folder: str, num_ranks: int) -> list[FileRecord] | None:
    """Return the files that the ranks recorded in a checkpoint's folder; None until every rank has written its note."""
    notes = [checkpoint / folder / NOTE.format(rank) for rank in range(num_ranks)]
    if not all(note.exists() for note in notes):
        return None
    records = [FileRecord(**record) for note in notes for record in read_json(note)]
    return [replace(record, path=f"{folder}/{record.path}") for record in records]


def remove_notes(checkpoint: Path) -> None:
    for note in checkpoint.glob(f"*/{NOTE.format('*')}"):
        note.unlink()


def is_checkpoint(folder: Path) -> bool:
    """Return whether the folder is a checkpoint, complete or corrupt. The manifest's content decides, because run
    folders also contain a file with this name."""
    if not folder.is_dir():
        return False
    try:
        manifest = parse_json(read_text(folder / MANIFEST))
        return isinstance(manifest, dict) and "content" in manifest
    except FileNotFoundError:
        return False
    except ValueError:
        return True


def write_manifest(folder: Path, step: int, state: Mapping[str, Any], files: Iterable[FileRecord]) -> None:
    """Write the manifest that makes a folder a checkpoint. `files` are all files in the folder, already flushed to
    disk."""
    content = {FORMAT_KEY: FORMAT, "step": step, "state": state, "files": [asdict(record) for record in files]}
    write_synced(folder / MANIFEST, json.dumps({"sha256": _digest(content), "content": content}, indent=1) + "\n")


def _remedy(checkpoint: Path) -> str:
    earlier = intact_before(checkpoint)
    if earlier is None:
        return "No earlier checkpoint exists. Fix: start from scratch with resume=never run.replace=true"
    return f"Fix: resume from the previous checkpoint with {shlex.quote(f'resume={earlier}')}"


def _digest(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def write_synced(file: Path, text: str) -> None:
    """Write a text file and flush it to disk. If the disk is full, wait as in `retry_when_full`."""

    def write() -> None:
        file.unlink(missing_ok=True)  # do not write through a link
        with file.open("x", encoding="utf-8") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())

    retry_when_full(write, file)
