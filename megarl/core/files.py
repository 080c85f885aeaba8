"""File operations: folders that appear only when complete, numbered names and JSON lines."""

from __future__ import annotations

import errno
import json
import math
import os
import re
import shutil
import stat
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any, BinaryIO, TypeGuard, TypeVar, get_type_hints

from megarl.core.errors import InfrastructureFailure, TooLittleSpace, UserError, causes
from megarl.core.outage import pauses
from megarl.core.text import printable

T = TypeVar("T")
Record = TypeVar("Record")

Progress = Callable[[str, int, int], None]
"""Progress callback. Its arguments are the latest action ("checked", "written", "verified"), the number of bytes
processed and the total number of bytes."""


MAX_DEPTH = 50
"""Maximum nesting depth of an external JSON value, such as a request or a tool call. Processing a deeper value would
exhaust the stack. Files may be twice as deep, because their rows contain such values."""


DISK_FULL = (errno.ENOSPC, errno.EDQUOT)

DISK_S = 300.0
"""Maximum time in seconds that a process waits for space on a full disk, per write."""

PROBE_BYTES = 2**20


MAX_DIGITS = 18
"""Maximum number of digits of a number in a file name."""

MAX_SHOWN = 60
"""Maximum number of characters of a value in an error message."""

_LARGE_FLOAT = re.compile(r"[eE]\+?[0-9]{3}|[0-9]{309}")
"""Matches part of a JSON number that may be too large for a float."""

MAX_BYTES, MAX_LINE_BYTES = 2**32, 2**28
"""Maximum size in bytes of a file that is read as a whole, and of a line."""


class UnusableFile(UserError):
    """Raised for a path that is not a readable regular file.

    Attributes:
        reason: what is wrong, without the path.
    """

    def __init__(self, path: Path, reason: str, fix: str) -> None:
        super().__init__(f"{printable(str(path))}: {reason}. Fix: {fix}")
        self.reason = reason


def no_progress(action: str, num_bytes: int, total: int) -> None:
    pass


@contextmanager
def new_folder(out: Path, num_bytes: int) -> Iterator[Path]:
    """Yield a hidden folder next to `out` to write into; rename it to `out` once its contents are on disk. The hidden
    folder is deleted if the body raises. Raise a UserError under the conditions of `require_room`."""
    require_room(out, num_bytes)
    with tempfile.TemporaryDirectory(prefix=f".{out.name}-", dir=out.parent) as temporary:
        folder = Path(temporary) / out.name
        folder.mkdir()
        yield folder
        for path in (*folder.rglob("*"), folder):
            sync(path)
        folder.rename(out)
    sync(out.parent)


def require_room(out: Path, num_bytes: int) -> None:
    """Raise a UserError if `out` exists or its disk has less than about `num_bytes` of free space."""
    if out.exists():
        raise UserError(f"{out} already exists. Fix: choose a new folder or remove this folder")
    out.parent.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(out.parent).free
    if num_bytes > free:
        raise TooLittleSpace(
            f"{out}: its disk has {free / 1e9:.2f} GB free, but {num_bytes / 1e9:.2f} GB are needed. Fix: free some "
            "space, or choose a folder on another disk"
        )


def retry_when_full(write: Callable[[], T], path: Path) -> T:
    """Call `write`, and retry for up to DISK_S seconds while the disk of `path` or its quota is full. A failed call
    must leave nothing behind. Raise InfrastructureFailure if the disk is still full after that."""
    remaining = pauses(DISK_S)
    is_waiting = False
    while True:
        try:
            return write()
        except Exception as error:
            if not is_full(error, path):
                raise
            pause = next(remaining, None)
            if pause is None:
                raise full_disk(path) from error
        if not is_waiting:
            is_waiting = True
            print(f"megarl: warning: {path}: the disk is full; waiting for space", file=sys.stderr, flush=True)
        time.sleep(pause)


def full_disk(path: Path) -> InfrastructureFailure:
    """Return the error for a disk that is still full after DISK_S."""
    return InfrastructureFailure(
        f"{path}: the disk was full or over quota for {DISK_S:g} s. Fix: free disk space, then resume with resume=auto"
    )


FULL_MESSAGES = tuple(os.strerror(number) for number in DISK_FULL)

HIDING_MESSAGES = ("PytorchStreamWriter failed", "inline_container", "iostream error", "unexpected pos")
"""torch's messages for a failed write. They omit the cause."""


def is_full(error: BaseException, path: Path) -> bool:
    """Return whether a full disk caused the error. Libraries such as safetensors mention the cause only in the message.
    torch hides the cause, so the disk of `path` is then tested with a small file."""
    chain = list(causes(error))
    if any(isinstance(each, TooLittleSpace) or getattr(each, "errno", None) in DISK_FULL for each in chain):
        return True
    messages = [str(each) for each in chain if getattr(each, "errno", None) is None]
    if any(text in message for text in FULL_MESSAGES for message in messages):
        return True
    return any(text in message for text in HIDING_MESSAGES for message in messages) and not _has_room(path)


def _has_room(path: Path) -> bool:
    """Return whether a small file can be written next to `path`."""
    try:
        with tempfile.TemporaryFile(dir=next(parent for parent in path.parents if parent.exists())) as file:
            file.write(bytes(PROBE_BYTES))
            file.flush()
            os.fsync(file.fileno())
    except OSError as probe:
        return probe.errno not in DISK_FULL
    return True


def read_text(path: Path) -> str:
    """Return the text of a regular file. Raise FileNotFoundError if the file does not exist, and a UserError that
    names it if it is a symbolic link, not a regular file, or larger than MAX_BYTES. Reading a pipe could block
    forever."""
    return _read_bytes(path).decode("utf-8", "replace")


def _read_bytes(path: Path) -> bytes:
    with open_regular(path) as file:
        if (size := os.fstat(file.fileno()).st_size) > MAX_BYTES:
            raise UserError(f"{path}: larger than {MAX_BYTES:,} bytes. Fix: remove the file")
        try:
            return file.read(size)
        except OSError as error:
            if error.errno != errno.ESTALE:
                raise
    return _read_bytes(path)  # on NFS, another node has replaced the file


def lines_of(file: BinaryIO, max_bytes: int = MAX_LINE_BYTES) -> Iterator[bytes]:
    """Yield the lines of a regular file up to its current size, because another process may keep appending to it. A
    line of more than `max_bytes` is split, so that it does not exhaust the memory."""
    left = os.fstat(file.fileno()).st_size - file.tell()
    while left > 0 and (line := file.readline(min(max_bytes, left))):
        left -= len(line)
        yield line


def open_regular(path: Path, *, follow: bool = False) -> BinaryIO:
    """Open a regular file for reading. Raise the same errors as `read_text`. follow: accept a symbolic link to a
    regular file."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | (0 if follow else os.O_NOFOLLOW))
    except FileNotFoundError:
        raise
    except OSError as error:
        is_link = error.errno == errno.ELOOP and not follow
        reason = "a symbolic link" if is_link else f"not readable ({error.strerror})"
        raise UnusableFile(path, reason, "replace it with a regular file, or remove it") from None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise UnusableFile(path, "not a regular file", "remove it")
    return os.fdopen(descriptor, "rb")


def read_json(path: Path) -> Any:
    """Return the value in a JSON file. Raise a UserError that names the file if it is not valid JSON or not a regular
    file, and FileNotFoundError if it does not exist."""
    text = read_text(path)
    try:
        return parse_json(text)
    except ValueError as error:
        raise UserError(f"{path}: not valid JSON: {error}. Fix: restore or remove the file") from None


def read_object(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file. Raise the errors of `read_json`, or a UserError for any other JSON value."""
    value = read_json(path)
    if not isinstance(value, dict):
        raise UserError(f"{path}: not a JSON object. Fix: restore or remove the file")
    return value


def shown(value: Any) -> str:
    """Format a value from a file for an error message: on one line, with at most MAX_SHOWN characters."""
    text = repr(value)
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}…"


def read_record(path: Path, kind: type[Record]) -> Record:
    """Return an instance of a data class from a JSON file that contains its fields. Raise the errors of `read_object`,
    or a UserError if fields are missing, unknown or of the wrong type. Only the types of str, int and float
    fields are checked."""
    values, hints = read_object(path), get_type_hints(kind)
    declared = fields(kind)  # pyright: ignore[reportArgumentType]  # a dataclass
    required = {field.name for field in declared if field.default is MISSING and field.default_factory is MISSING}
    for name in (values.keys() - hints.keys()) | (required - values.keys()):
        problem = "unknown key" if name in values else "missing key"
        raise UserError(f"{path}: {problem} {shown(name)}. Fix: restore or remove the file")
    for name, hint in hints.items():
        if hint in (str, int, float) and name in values and not is_plain(values[name], hint):
            raise UserError(
                f"{path}: {name}={shown(values[name])} is not {PLAIN[hint]}. Fix: restore or remove the file"
            )
    return kind(**values)


PLAIN = {str: "a string", int: "an integer", float: "a finite number"}
"""Types that `is_plain` checks -> their names in error messages."""


def is_plain(value: Any, kind: type[T]) -> TypeGuard[T]:
    """Return whether a JSON value is of this kind: a string, an integer of at most 63 bits, or a finite number."""
    if isinstance(value, bool):
        return False
    if kind is str:
        return isinstance(value, str)
    if isinstance(value, int):
        return abs(value) < 2**63
    return kind is float and isinstance(value, float) and math.isfinite(value)


def read_foreign_object(path: Path, key: str = "", fix: str = "copy the file again") -> dict[str, Any]:
    """Return the object in a JSON file that another program wrote, such as a model's config.json. The file may be a
    symbolic link. Raise a UserError if it is not a JSON object or cannot be read. The message begins with `key` and
    ends with the remedy `fix`."""
    try:
        return parse_object(_read_bytes(path.resolve()).decode("utf-8-sig"))
    except OSError as error:
        raise UserError(f"{key}{path}: cannot be read ({error.strerror}). Fix: {fix}") from None
    except UserError:
        raise
    except ValueError as error:
        raise UserError(f"{key}{path}: invalid JSON ({error}). Fix: {fix}") from None


def parse_json(text: str | bytes, parse_constant: Callable[[str], Any] | None = None) -> Any:
    """Return a JSON value. `parse_constant` replaces NaN and infinities, including numbers such as 1e999. Raise
    ValueError if the text is not JSON, is nested more than 2 * MAX_DEPTH levels deep, or has an integer with thousands
    of digits."""

    def parse_float(number: str) -> Any:
        value = float(number)
        return value if parse_constant is None or math.isfinite(value) else parse_constant(number)

    has_large = parse_constant is not None and _LARGE_FLOAT.search(str(text))
    try:
        # Calling parse_float for every float would make parsing several times slower.
        value = json.loads(text, parse_constant=parse_constant, parse_float=parse_float if has_large else None)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if is_deeper(value, 2 * MAX_DEPTH):
        raise ValueError("nested too deeply")
    return value


def parse_object(text: str | bytes) -> dict[str, Any]:
    """Return a JSON object. Raise ValueError under the conditions of `parse_json`, or for any other JSON value."""
    value = parse_json(text)
    if not isinstance(value, dict):
        raise ValueError(f"expected an object, found {type(value).__name__}")
    return value


def is_deeper(value: Any, limit: int) -> bool:
    """Return whether lists and objects are nested more than `limit` levels deep."""
    level = [value]
    for _ in range(limit + 1):
        level = [item for each in level if isinstance(each, dict | list) for item in _items(each)]
        if not level:
            return False
    return True


def _items(container: dict[str, Any] | list[Any]) -> Iterable[Any]:
    return container.values() if isinstance(container, dict) else container


def sync(path: Path) -> None:
    """Flush a file, or the entries of a folder, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def number_in(name: str, pattern: str) -> int | None:
    """Return the number n such that pattern.format(n) equals the name; None if there is none. Example pattern:
    step_{:06d}."""
    before, _, end = pattern.partition("{")
    after = end.partition("}")[2]
    if not (name.startswith(before) and name.endswith(after)):
        return None
    digits = name.removeprefix(before).removesuffix(after)
    is_number = digits.isascii() and digits.isdecimal() and len(digits) <= MAX_DIGITS
    number = int(digits) if is_number else None
    return number if number is not None and pattern.format(number) == name else None


def numbered(folder: Path, pattern: str) -> dict[int, Path]:
    """Return the folder's entries whose names match the pattern, in ascending order of their numbers."""
    try:
        names = os.listdir(folder)
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return {}
    numbers = ((number, name) for name in names if (number := number_in(name, pattern)) is not None)
    return {number: folder / name for number, name in sorted(numbers)}


def write_new_file(option: str, path: Path, text: str) -> None:
    """Write a file that does not exist yet. Raise a UserError if the file already exists or cannot be written. option:
    the command-line option that names the file, such as --html."""
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise UserError(
            f"{option} {path}: already exists, and megarl does not overwrite it. Fix: choose another file name"
        ) from None
    except OSError as error:
        raise UserError(
            f"{option} {path}: cannot be written ({error.strerror}). Fix: choose a file in a writable folder"
        ) from None


def replace_text(file: Path, text: str) -> None:
    """Write a text file atomically, replacing any earlier version. If the disk is full, wait as in
    `retry_when_full`."""

    def write() -> None:
        with replacement(file) as stream:
            stream.write(text.encode(errors="replace"))

    retry_when_full(write, file)


@contextmanager
def replacement(file: Path) -> Iterator[BinaryIO]:
    """Yield a new file. It replaces `file` when the body ends, and is deleted if the body raises. An existing link or
    pipe is not followed."""
    new = file.with_name(f".{file.name}")
    new.unlink(missing_ok=True)
    try:
        with new.open("xb") as stream:
            yield stream
        new.replace(file)
    except BaseException:
        new.unlink(missing_ok=True)
        raise


def append_rows(path: Path, rows: Iterable[Any]) -> None:
    """Append values to a file as lines of human-readable JSON: all of them, or none if OSError is raised."""
    with path.open("ab", buffering=0) as file:
        size = file.seek(0, os.SEEK_END)
        try:
            for row in rows:
                # UTF-8 cannot encode lone surrogates. backslashreplace turns them into JSON escapes.
                left = memoryview(f"{json.dumps(row, ensure_ascii=False)}\n".encode(errors="backslashreplace"))
                while left:
                    left = left[file.write(left) or 0 :]
        except OSError:
            with suppress(OSError):
                file.truncate(size)
            raise
