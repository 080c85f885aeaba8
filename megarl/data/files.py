"""Data rows streamed from JSONL and Parquet files."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from megarl.core.errors import UserError
from megarl.core.files import parse_json
from megarl.core.text import encodable
from megarl.data import image_parts as parts
from megarl.data.row import Content, LabelRow, MessageRow, PreferenceRow, Row, as_messages

MESSAGES_TYPE = "a list of {role, content} messages with text values"
PROMPT_TYPE = f"text or {MESSAGES_TYPE}"
PARTS_MESSAGES_TYPE = (
    "a list of {role, content} messages, whose content is text or a list of parts: {type: text, text: TEXT}, "
    "{type: image}, or an image in the part: {type: image, image: PATH} or {type: image_url, image_url: {url: URL}}"
)
PARTS_PROMPT_TYPE = f"text or {PARTS_MESSAGES_TYPE}"
RESPONSE_TYPE = (
    "text or a list of {role, content} messages, whose content is text or a list of parts {type: text, text: TEXT}"
)
IMAGES_TYPE = "null, or one or a list of images, each a file path, a data: URL, bytes or {bytes, path}"
ALL_COLUMNS = "row"
"""Name that stands for all columns of a row."""

NO_COLUMNS: Mapping[str, str | None] = {}

STEPS_TYPE = "a non-empty list of strings or token ids"
LABELS_TYPE = "a list with a number from 0 to 1, true, false or null for each step, with at least one label"

ANSWER_TYPE = "a JSON value (text, number, true/false, null, list or object)"


Record = dict[str, Any]
"""One row: column name -> value."""


@dataclass(frozen=True, slots=True)
class Column:
    """A required column: its config key, its name, a description of its type, and a predicate for valid values."""

    key: str
    name: str
    expected: str
    is_valid: Callable[[Any], bool]


def file_rows(
    path: Path,
    prompt_column: str,
    answer_column: str,
    further: Mapping[str, str | None] = NO_COLUMNS,
    source_column: str | None = None,
    image_column: str | None = None,
) -> Iterator[Row]:
    """Yield the rows in a .jsonl file (blank lines skipped, rows numbered by line) or in a .parquet file. Raise a
    UserError if the file is missing or unreadable, a column is missing, or a value has the wrong type. The message
    names file, row and column.

    Args:
        further: additional columns to include, each mapped to the function or key that requires it, or to None if rows
            may lack the column. ALL_COLUMNS includes every column except `image_column`.
        image_column: column with images. If set, the content of messages may be a list of parts. A row whose parts
            contain images may lack the column.
    """
    columns = (
        _prompt(prompt_column, image_column),
        Column("data.answer_column", answer_column, ANSWER_TYPE, _is_answer),
    )
    columns += tuple(
        Column(
            function if function.startswith("data.") else f"the parameter of {function}", name, ANSWER_TYPE, _is_json
        )
        for name, function in further.items()
        if function is not None and name not in (ALL_COLUMNS, image_column)
    )
    if source_column is not None:
        columns += (Column("data.source_column", source_column, "text", _is_text),)
        further = {source_column: None, **further}
    read = {*further, *([] if image_column is None else [image_column])}
    for number, record in _records(path, columns, read):
        bare = record if image_column is None else _without_images(record, prompt_column, image_column)
        included = {name: record if name == image_column else bare for name in further if name != ALL_COLUMNS}
        included |= {name: bare for name in bare if ALL_COLUMNS in further and name not in included}
        values = {name: column_of(row, name) for name, row in sorted(included.items()) if has_column(row, name)}
        for name, value in values.items():
            if not _is_json(value):
                if name == image_column:
                    raise UserError(
                        f"{path}:{number}: column {name!r} (data.image_column) contains encoded images, which are not "
                        f"passed to reward functions as a column. Fix: rename the function's parameter `{name}` to "
                        "prompt_images, which receives the decoded images, or store paths in the column"
                    )
                raise _wrong_type(f"{path}:{number}", name, ANSWER_TYPE, value)
        prompt = _plain(column_of(record, prompt_column))
        images = _images(record, image_column, prompt, f"{path}:{number}")
        yield Row(number, prompt, column_of(record, answer_column), values, images=images)


def _without_images(record: Record, prompt_column: str, image_column: str) -> Record:
    """Return the row without its image column and without the images in the parts of its prompt."""
    record = _changed(record, prompt_column, lambda row, name: {**row, name: parts.without_images(row[name])})
    if not has_column(record, image_column):
        return record
    return _changed(record, image_column, lambda row, name: {key: row[key] for key in row if key != name})


def _changed(record: Record, column: str, change: Callable[[Record, str], Record]) -> Record:
    """Return the row with `change` applied to the struct that contains a column. column: plain or dotted name."""
    if column in record:
        return change(record, column)
    outer, _, inner = column.partition(".")
    return {**record, outer: _changed(record[outer], inner, change)}


def _images(record: Record, column: str | None, prompt: Content, place: str) -> tuple[Any, ...]:
    """Return the images in a row's image column; () if the data has no such column."""
    if column is None:
        return ()
    if not has_column(record, column) and parts.has_own_images(prompt):
        return ()
    _require_columns(record, [Column("data.image_column", column, IMAGES_TYPE, parts.is_image)], place)
    value = column_of(record, column)
    images = () if value is None else tuple(value) if isinstance(value, list) else (value,)
    if not all(map(parts.is_image, images)):
        raise _wrong_type(place, column, IMAGES_TYPE, value)
    return images


def content_of(value: Any, column: str, place: str) -> Content | None:
    """Return the text or messages in an optional column, or None if the value is missing or empty. Raise a UserError
    for any other value."""
    if value is None or value == "" or value == []:
        return None
    if not (isinstance(value, str) or _is_messages(value)):
        raise _wrong_type(place, column, PROMPT_TYPE, value)
    return _plain(value)


def message_rows(path: Path, messages_column: str, image_column: str | None = None) -> Iterator[MessageRow]:
    """Yield the conversations in a file, after the same checks as in `file_rows`."""
    is_content = _is_text if image_column is None else parts.is_content
    expected = MESSAGES_TYPE if image_column is None else PARTS_MESSAGES_TYPE
    column = Column("data.messages_column", messages_column, expected, lambda value: _is_messages(value, is_content))
    for number, record in _records(path, (column,), () if image_column is None else (image_column,)):
        messages = as_messages(_plain(column_of(record, messages_column)), "user")
        images = _images(record, image_column, messages, f"{path}:{number}")
        yield MessageRow(number, messages, images=images)


def preference_rows(
    path: Path, prompt_column: str, chosen_column: str, rejected_column: str, image_column: str | None = None
) -> Iterator[PreferenceRow]:
    """Yield the preference pairs in a file, after the same checks as in `file_rows`. Only prompts have images."""
    responses = chosen_column, rejected_column
    columns = (
        _prompt(prompt_column, image_column),
        _response("data.chosen_column", chosen_column),
        _response("data.rejected_column", rejected_column),
    )
    for number, record in _records(path, columns, () if image_column is None else (image_column,)):
        prompt = _plain(column_of(record, prompt_column))
        chosen, rejected = (parts.joined(_plain(column_of(record, name))) for name in responses)
        images = _images(record, image_column, prompt, f"{path}:{number}")
        yield PreferenceRow(number, prompt, chosen, rejected, images=images)


def label_rows(path: Path, prompt_column: str, steps_column: str, labels_column: str) -> Iterator[LabelRow]:
    """Yield the rows with labeled steps in a file, after the same checks as in `file_rows`."""
    columns = (
        _text(prompt_column),
        Column("data.steps_column", steps_column, STEPS_TYPE, _is_steps),
        Column("data.labels_column", labels_column, LABELS_TYPE, _is_labels),
    )
    for number, [prompt, steps, labels] in _values(path, columns):
        if len(steps) != len(labels):
            raise UserError(
                f"{path}:{number}: column {steps_column!r} has {len(steps)} steps, but column {labels_column!r} has "
                f"{len(labels)} labels. Fix: add one label per step, and use null for steps without a label"
            )
        yield LabelRow(number, _plain(prompt), steps, [None if label is None else float(label) for label in labels])


def _text(name: str) -> Column:
    return Column("data.prompt_column", name, PROMPT_TYPE, lambda value: _is_text(value) or _is_messages(value))


def _response(key: str, name: str) -> Column:
    def is_valid(value: Any) -> bool:
        return isinstance(value, str) or _is_messages(value, parts.is_text_content)

    return Column(key, name, RESPONSE_TYPE, is_valid)


def _prompt(name: str, image_column: str | None) -> Column:
    """Return the prompt column. With images, its messages may contain parts."""
    if image_column is None:
        return _text(name)

    def is_valid(value: Any) -> bool:
        return isinstance(value, str) or _is_messages(value, parts.is_content)

    return Column("data.prompt_column", name, PARTS_PROMPT_TYPE, is_valid)


def _values(path: Path, columns: Sequence[Column]) -> Iterator[tuple[int, list[Any]]]:
    """Yield the number of each row and its values, in the order of `columns`."""
    for number, record in _records(path, columns):
        yield number, [column_of(record, column.name) for column in columns]


def _records(path: Path, columns: Sequence[Column], further: Collection[str] = ()) -> Iterator[tuple[int, Record]]:
    """Yield the number and columns of each row, after checking `columns`."""
    for number, record in _READERS[path.suffix](path, columns, further):
        record = encodable(record)
        _require_columns(record, columns, f"{path}:{number}")
        for column in columns:
            if not column.is_valid(value := column_of(record, column.name)):
                raise _wrong_type(f"{path}:{number}", column.name, column.expected, value)
        yield number, record


def require_data_file(path: Path, key: str) -> None:
    """Raise a UserError that names the config key if the path is not a file in a known format."""
    if path.suffix not in _READERS:
        sources = "arithmetic, reasoning_gym:TASK, or a" if key == "data.source" else "a"
        raise UserError(f"{key}={path}: unknown data source. Fix: use {sources} .jsonl or .parquet file")
    if not path.is_file():
        raise UserError(f"{key}={path}: not a file. Fix: set {key} to the path of an existing .jsonl or .parquet file")


def has_column(record: Mapping[str, Any], name: str) -> bool:
    """Return whether a row has this column. A dotted name such as reward_model.ground_truth reaches into a struct."""
    if name in record:
        return True
    outer, dot, inner = name.partition(".")
    return bool(dot) and isinstance(record.get(outer), Mapping) and has_column(record[outer], inner)


def column_of(record: Mapping[str, Any], name: str) -> Any:
    """Return the value of a column given its plain or dotted name."""
    if name in record:
        return record[name]
    outer, _, inner = name.partition(".")
    return column_of(record[outer], inner)


def _jsonl_records(path: Path, columns: Sequence[Column], _: Collection[str]) -> Iterator[tuple[int, Record]]:
    with _open(path) as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                record = parse_json(line)
            except ValueError as error:
                raise UserError(
                    f"{path}:{number}: invalid JSON ({error}). Fix: write one UTF-8 JSON object per line"
                ) from error
            if not isinstance(record, dict):
                raise UserError(
                    f"{path}:{number}: expected one JSON object per line, found {type(record).__name__}. Fix: write "
                    "the row as an object that maps column names to values"
                )
            yield number, record


def _open(path: Path) -> BinaryIO:
    try:
        return path.open("rb")
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}). Fix: make the file readable") from None


def _parquet_records(path: Path, columns: Sequence[Column], further: Collection[str]) -> Iterator[tuple[int, Record]]:
    import pyarrow
    import pyarrow.parquet

    damage = (pyarrow.ArrowException, OSError, ValueError, OverflowError)
    with _open(path) as stream:
        try:
            file = pyarrow.parquet.ParquetFile(stream)
        except damage as error:
            raise UserError(
                f"{path}: not a Parquet file ({_one_line(error)}). Fix: write the file again, or rename it to .jsonl "
                "if it contains JSON lines"
            ) from error
        _require_columns(_inner_names(file.schema_arrow), columns, f"{path}:1")
        available = file.schema_arrow.names
        requested = {*further, *(column.name for column in columns)}
        names = {name if name in available else name.partition(".")[0] for name in requested} & {*available}
        number = 0
        try:
            for batch in file.iter_batches(batch_size=1024, columns=None if ALL_COLUMNS in further else list(names)):
                for record in batch.to_pylist():
                    number += 1
                    yield number, record
        except damage as error:
            raise UserError(
                f"{path}:{number + 1}: this row or a later one cannot be read ({_one_line(error)}). Fix: write the "
                "file again"
            ) from error


_READERS = {".jsonl": _jsonl_records, ".parquet": _parquet_records}


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def _inner_names(fields: Iterable[Any]) -> Record:
    """Return the column names of an Arrow schema, nested for struct columns."""
    return {field.name: _inner_names(field.type) if hasattr(field.type, "fields") else None for field in fields}


def _require_columns(record: Record, columns: Sequence[Column], place: str) -> None:
    for column in columns:
        if not has_column(record, column.name):
            verb = "set" if column.key.startswith("data.") else "rename"
            raise UserError(
                f"{place}: missing column {column.name!r} (expected: {column.expected}). Fix: {verb} {column.key} to "
                f"one of the columns {', '.join(record)}"
            )


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_messages(value: Any, is_content: Callable[[Any], bool] = _is_text) -> bool:
    return isinstance(value, list) and bool(value) and all(_is_message(entry, is_content) for entry in value)


def _is_message(entry: Any, is_content: Callable[[Any], bool]) -> bool:
    if not isinstance(entry, dict):
        return False
    # Parquet gives every row the fields of all rows and fills missing ones with None.
    fields = {name: value for name, value in entry.items() if value is not None}
    return fields.keys() == {"role", "content"} and _is_text(fields["role"]) and is_content(fields["content"])


def _is_steps(value: Any) -> bool:
    if not isinstance(value, list) or not value:
        return False
    return all(isinstance(step, str) and step for step in value) or all(
        type(step) is int and 0 <= step < 2**31 for step in value
    )


def _is_labels(value: Any) -> bool:
    if not isinstance(value, list) or all(label is None for label in value):
        return False
    return all(label is None or (isinstance(label, int | float) and 0 <= label <= 1) for label in value)


def _is_answer(value: Any) -> bool:
    """Return whether the value is JSON, excluding infinity and NaN. pandas writes NaN for a missing answer."""
    return _is_json(value) and not (isinstance(value, float) and not math.isfinite(value))


def _is_json(value: Any) -> bool:
    try:
        json.dumps(value)
    except (TypeError, ValueError):  # ValueError: an integer with thousands of digits
        return False
    return True


def _plain(content: Content) -> Content:
    """Drop every message field except role and content. Text is returned unchanged."""
    if isinstance(content, str):
        return content
    return [{"role": message["role"], "content": message["content"]} for message in content]


def _wrong_type(place: str, column: str, expected: str, value: Any) -> UserError:
    text = repr(value)
    found = f"{type(value).__name__} {text if len(text) <= 80 else text[:79] + '…'}"
    return UserError(
        f"{place}: column {column!r}: expected {expected}, found {found}. Fix: write a value of the "
        "expected type, or drop the row"
    )
