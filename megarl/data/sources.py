"""The files of a data source, and names for their rows."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from megarl.config.data_schema import Data
from megarl.data.files import require_data_file
from megarl.data.row import LabelRow, MessageRow, PreferenceRow, Row

AnyRow = TypeVar("AnyRow", Row, MessageRow, PreferenceRow, LabelRow)


def rows_of_files(data: Data, read: Callable[[Path], Iterator[AnyRow]]) -> Iterator[AnyRow]:
    """Yield the rows of all files in order. `read` yields the rows of one file."""
    for source in data.sources:
        path = Path(source).expanduser()
        require_data_file(path, "data.source" if source == data.source else "data.more_sources")
        yield from (replace(row, source=source) for row in read(path))


def place_of(row: Row | MessageRow | PreferenceRow | LabelRow, data: Data) -> str:
    """Return the location of a row, for error messages."""
    return f"{row.source or data.source}:{row.number}"


def row_name(row: Row | MessageRow | PreferenceRow | LabelRow, data: Data) -> str:
    """Return a name for the row that is unique in the data: file name and row number. If several files have the same
    name, the file name is preceded by the folders below the files' common folder."""
    source = row.source or data.source
    name = Path(source).name
    is_taken = [Path(other).name for other in data.sources].count(name) > 1
    unique = os.path.relpath(source, os.path.commonpath(data.sources)) if is_taken else name
    return f"{unique}:{row.number}"
