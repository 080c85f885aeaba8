"""A finding of the examination."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

State = Literal["ok", "note", "problem"]
"""Whether something will do, is worth knowing, or has to be changed before a run."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at. wanted: the tested range, or what a run needs; fix: one line, where it is to be
    changed."""

    name: str
    state: State
    found: str
    wanted: str = ""
    fix: str = ""
