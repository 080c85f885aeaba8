"""Numbered file names, and files of JSON lines."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest

from megarl.core import files
from megarl.core.errors import InfrastructureFailure, TooLittleSpace
from megarl.core.files import append_rows, number_in, numbered, open_regular, retry_when_full


@pytest.mark.parametrize(
    ("name", "number"),
    [
        ("step_000020.jsonl", 20),
        ("step_1000000.jsonl", 1_000_000),
        ("step_20.jsonl", None),
        ("step_0000020.jsonl", None),
        ("step_000020.jsonl.bak", None),
        ("000020.jsonl", None),
        ("step_00002x.jsonl", None),
        ("step_.jsonl", None),
        (f"step_{'9' * 5000}.jsonl", None),
        ("step_٠٠٠٠٢٠.jsonl", None),  # non-ASCII digits
    ],
)
def test_number_in_accepts_only_names_as_formatted(name: str, number: int | None) -> None:
    assert number_in(name, "step_{:06d}.jsonl") == number


def test_numbered_sorts_entries_by_number(tmp_path: Path) -> None:
    for name in ("attempt_10", "attempt_9", "attempt_9.old", "attempt_09", "other"):
        (tmp_path / name).touch()
    assert list(numbered(tmp_path, "attempt_{}").items()) == [
        (9, tmp_path / "attempt_9"),
        (10, tmp_path / "attempt_10"),
    ]
    assert numbered(tmp_path / "none", "attempt_{}") == {}


def test_append_rows_round_trips_any_text(tmp_path: Path) -> None:
    rows = [{"answer": "\ud800 é\u2028", "text": ["\udc80\n\\udc80", None]}, {"\udfff": 1}]
    append_rows(tmp_path / "rows", rows[:1])
    append_rows(tmp_path / "rows", rows[1:])
    lines = (tmp_path / "rows").read_text(encoding="utf-8").split("\n")
    assert [json.loads(line) for line in lines[:-1]] == rows and lines[-1] == ""
    assert "é" in lines[0]


def raised(error: Exception, cause: Exception | None = None, context: Exception | None = None) -> Exception:
    error.__cause__, error.__context__ = cause, context
    error.__suppress_context__ = cause is not None  # assigning a cause sets the flag, even if the cause is None
    return error


FULL, QUOTA = OSError(errno.ENOSPC, "No space left on device"), OSError(errno.EDQUOT, "Disk quota exceeded")
TORCH = "[enforce fail at inline_container.cc:672] . unexpected pos 704 vs 598"
OF_A_FULL_DISK = [
    *(FULL, QUOTA, TooLittleSpace("a: too small"), raised(RuntimeError("save failed"), cause=FULL)),
    raised(ValueError("b"), cause=raised(RuntimeError("a"), context=QUOTA)),
    Exception("Error while serializing: I/O error: No space left on device (os error 28)"),
    *(RuntimeError(TORCH), OSError("Error writing bytes to file. Detail: [errno 28] No space left on device")),
]
UNRELATED = [
    *(OSError(errno.EIO, "Input/output error"), PermissionError(errno.EACCES, "Permission denied")),
    *(
        ValueError("a shape differs"),
        KeyError("weight"),
        AssertionError(),
        raised(RuntimeError("a"), cause=KeyError("b")),
    ),
]


@pytest.fixture
def full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, list[float]]:
    """Return a file on a full disk, and a list of the pauses."""
    pauses: list[float] = []

    def refuse(**_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(files.time, "sleep", pauses.append)
    monkeypatch.setattr(files.tempfile, "TemporaryFile", refuse)
    return tmp_path / "file", pauses


def failing(error: Exception) -> None:
    raise error


@pytest.mark.parametrize("error", OF_A_FULL_DISK, ids=range(len(OF_A_FULL_DISK)))
def test_writes_are_retried_on_a_full_disk(full_disk, error: Exception) -> None:
    file, pauses = full_disk
    with pytest.raises(InfrastructureFailure, match="was full or over quota for 300 s"):
        retry_when_full(lambda: failing(error), file)
    assert sum(pauses) == files.DISK_S


@pytest.mark.parametrize("error", UNRELATED, ids=range(len(UNRELATED)))
def test_unrelated_errors_are_raised_at_once_on_a_full_disk(full_disk, error: Exception) -> None:
    file, pauses = full_disk
    with pytest.raises(type(error)) as caught:
        retry_when_full(lambda: failing(error), file)
    assert caught.value is error and not pauses


def test_hidden_write_error_on_a_disk_with_space_is_raised(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="unexpected pos"):
        retry_when_full(lambda: failing(RuntimeError(TORCH)), tmp_path / "file")


def test_file_that_another_node_replaces_is_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On NFS, reading an open file that has been replaced fails."""
    file = tmp_path / "file.json"
    file.write_text("[1]")
    opened = []

    def open_once_stale(path: Path) -> Any:
        opened.append(open_regular(path))
        stale = OSError(errno.ESTALE, "Stale file handle")
        return StaleFile(opened[0], stale) if len(opened) == 1 else opened[1]

    monkeypatch.setattr(files, "open_regular", open_once_stale)
    assert files.read_json(file) == [1] and len(opened) == 2


class StaleFile:
    """An open file whose content cannot be read."""

    def __init__(self, file: Any, error: OSError) -> None:
        self.file, self.error, self.fileno = file, error, file.fileno

    def __enter__(self) -> StaleFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.file.close()

    def read(self, size: int) -> bytes:
        raise self.error
