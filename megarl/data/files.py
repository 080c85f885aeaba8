"""Prompt data in JSONL and parquet files, read as a stream."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from megarl.data.row import Row

PROMPT_TYPE = "text or a list of {role, content} messages of text"
ANSWER_TYPE = "a JSON value (text, number, true/false, null, list or object)"


def file_rows(path: Path, prompt_column: str, answer_column: str) -> Iterator[Row]:
    """The rows of a .jsonl file (blank lines skipped, rows numbered by line) or of a .parquet file.

    Raises ValueError, with file, row and column, for a missing or unreadable file, a missing column, or a value of
    the wrong type.
    """
    readers = {".jsonl": _jsonl_records, ".parquet": _parquet_records}
    if path.suffix not in readers:
        raise ValueError(f"data.source: {path} is neither arithmetic nor a .jsonl or .parquet file")
    if not path.is_file():
        raise ValueError(f"data.source: {path} is not a file; check the path (now in {Path.cwd()})")
    columns = {"data.prompt_column": prompt_column, "data.answer_column": answer_column}
    for number, record in readers[path.suffix](path, columns):
        place = f"{path}:{number}"
        _require_prompt(record[prompt_column], f"{place}: column {prompt_column!r}")
        _require_json(record[answer_column], f"{place}: column {answer_column!r}")
        yield Row(number, _plain(record[prompt_column]), record[answer_column])


def _jsonl_records(path: Path, columns: Mapping[str, str]) -> Iterator[tuple[int, dict[str, Any]]]:
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                record = json.loads(line)
            except (json.JSONDecodeError, UnicodeDecodeError) as error:
                raise ValueError(f"{path}:{number}: not valid JSON ({error}); one object a line, UTF-8") from error
            if not isinstance(record, dict):
                raise ValueError(f"{path}:{number}: a JSON {type(record).__name__}, expected one object a line")
            _require_columns(record.keys(), columns, f"{path}:{number}")
            yield number, record


def _parquet_records(path: Path, columns: Mapping[str, str]) -> Iterator[tuple[int, dict[str, Any]]]:
    import pyarrow
    import pyarrow.parquet

    try:
        file = pyarrow.parquet.ParquetFile(path)
    except pyarrow.ArrowInvalid as error:
        raise ValueError(f"data.source: {path} is not a parquet file ({error})") from error
    with file:
        _require_columns(file.schema_arrow.names, columns, f"{path}:1")
        number = 0
        for batch in file.iter_batches(batch_size=1024, columns=list(columns.values())):
            for record in batch.to_pylist():
                number += 1
                yield number, record


def _require_columns(available: Collection[str], columns: Mapping[str, str], place: str) -> None:
    for key, column in columns.items():
        if column not in available:
            expected = PROMPT_TYPE if key == "data.prompt_column" else ANSWER_TYPE
            raise ValueError(
                f"{place}: no column {column!r} (expected: {expected}); "
                f"the columns are {', '.join(available)}; set {key} to the right one"
            )


def _require_prompt(value: Any, place: str) -> None:
    if isinstance(value, str):
        return
    if isinstance(value, list) and value and all(_is_message(entry) for entry in value):
        return
    raise ValueError(f"{place} holds {_shown(value)}, expected {PROMPT_TYPE}")


def _is_message(entry: Any) -> bool:
    if not isinstance(entry, dict):
        return False
    # Parquet fills the fields that only other rows have with None.
    fields = {name: value for name, value in entry.items() if value is not None}
    return fields.keys() == {"role", "content"} and all(isinstance(value, str) for value in fields.values())


def _require_json(value: Any, place: str) -> None:
    try:
        json.dumps(value)
    except TypeError as error:
        raise ValueError(f"{place} holds {_shown(value)}, expected {ANSWER_TYPE}") from error


def _plain(prompt: str | list[dict[str, Any]]) -> str | list[dict[str, str]]:
    if isinstance(prompt, str):
        return prompt
    return [{"role": message["role"], "content": message["content"]} for message in prompt]


def _shown(value: Any) -> str:
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= 80 else text[:79] + '…'}"
