"""One row of a prompt data set, before it is tokenised."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

Message = dict[str, str]
"""{"role": …, "content": …}"""


@dataclass(frozen=True, slots=True)
class Row:
    """number: 1-based, in the file or the procedure. answer: anything that JSON can hold."""

    number: int
    prompt: str | list[Message]
    answer: Any
