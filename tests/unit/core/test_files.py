"""Numbered file names, and files of JSON lines."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megarl.core.files import append_rows, number_in, numbered


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
