"""`encodable` and the data readers replace lone surrogates in external text."""

from __future__ import annotations

import json

import pytest

from megarl.core.errors import UserError
from megarl.core.text import encodable
from megarl.data.files import file_rows


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("plain é 😀", "plain é 😀"),
        ("\ud83d", "\ufffd"),
        ("a\ude00b", "a\ufffdb"),
        ("\ud83d\ude00", "😀"),
        ("\ud83d\ud83d\ude00", "\ufffd😀"),
        ("\ufeffa", "\ufeffa"),
        ({"\ud83d": ["\ud83d", {"a": "\ude00"}, 1, None]}, {"\ufffd": ["\ufffd", {"a": "\ufffd"}, 1, None]}),
    ],
)
def test_encodable_replaces_lone_surrogates(text, expected):
    assert encodable(text) == expected
    json.dumps(encodable(text), ensure_ascii=False).encode()


def test_lone_surrogates_in_data_rows_are_replaced(tmp_path):
    row = {"prompt": [{"role": "user", "content": "a\ud83d"}], "answer": {"\ude00": "\ude00"}, "level": "\ud800"}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    [read] = file_rows(tmp_path / "rows.jsonl", "prompt", "answer", {"level": None})
    assert read.prompt == [{"role": "user", "content": "a\ufffd"}]
    assert read.answer == {"\ufffd": "\ufffd"} and read.columns == {"level": "\ufffd"}


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a": ' + "9" * 5000 + "}"])
def test_unreadable_row_is_named_with_its_line(tmp_path, text):
    (tmp_path / "rows.jsonl").write_text(f"{text}\n")
    with pytest.raises(UserError, match=r"rows.jsonl:1: "):
        list(file_rows(tmp_path / "rows.jsonl", "prompt", "answer"))
