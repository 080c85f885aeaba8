"""The lines of a ledger. Each ends with a hash of its content and of the previous line's hash."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megarl.core.files import lines_of, open_regular, shown

HASH_DIGITS = 32
START = "0" * HASH_DIGITS
"""The hash that precedes the first line."""

_END = re.compile(rb', "hash": "([0-9a-f]{%d})"\}\n' % HASH_DIGITS)
_END_BYTES = len(', "hash": ""}\n') + HASH_DIGITS
"""Size in bytes of the end of a line. The line's hash does not cover it."""


MALFORMED = (KeyError, TypeError, ValueError, AttributeError, IndexError, OverflowError, RecursionError)
"""Errors caused by JSON values of types that megarl does not write."""


class Broken(Exception):
    """The first contradiction in a run's files."""

    def __init__(self, place: str, expected: str, found: str):
        super().__init__(f"{place}: expected {expected}, but found {found}")


def sealed(previous: str, content: Mapping[str, Any]) -> tuple[str, bytes]:
    """Return the hash and the bytes of the line that follows the line with the hash `previous`."""
    body = json.dumps(content)[:-1].encode()
    digest = _hash(previous, body)
    return digest, body + f', "hash": "{digest}"}}\n'.encode()


def recorded_hash(line: bytes) -> str | None:
    """Return the hash at the end of a complete line, or None if the line has none."""
    match = _END.fullmatch(line[-_END_BYTES:])
    return None if match is None else match[1].decode()


def _hash(previous: str, body: bytes) -> str:
    return hashlib.sha256(previous.encode() + body).hexdigest()[:HASH_DIGITS]


@dataclass(slots=True)
class Chain:
    """Reads a ledger line by line.

    Attributes:
        number: number of complete lines that were read.
        last: hash of the last complete line.
        is_torn: whether the file ends with a partial line, as when the run was killed during a write.
    """

    path: Path
    number: int = 0
    last: str = START
    is_torn: bool = False

    def place(self) -> str:
        return f"{self.path} line {self.number}"

    def lines(self) -> Iterator[dict[str, Any]]:
        """Yield the content of each line. Raise Broken for the first line whose hash is wrong."""
        with open_regular(self.path) as file:
            for line in lines_of(file):
                if not line.endswith(b"\n"):
                    self.is_torn = True
                    return
                self.number += 1
                found, expected = recorded_hash(line), _hash(self.last, line[:-_END_BYTES])
                if found != expected:
                    problem = "no hash" if found is None else found
                    raise Broken(
                        self.place(),
                        f"the hash {expected} of this line after line {self.number - 1}",
                        f"{problem}. This line was changed, or lines before it were added, removed or moved",
                    )
                self.last = expected
                yield self._parsed(line)

    def _parsed(self, line: bytes) -> dict[str, Any]:
        try:
            content = json.loads(line)
        except (ValueError, RecursionError):
            content = None
        if not isinstance(content, dict):
            raise Broken(self.place(), "a JSON object", shown(line[:80]))
        return content
