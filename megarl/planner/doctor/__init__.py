"""Checks a machine's installed packages, hardware and limits, and suggests a fix for each problem."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

State = Literal["ok", "note", "problem"]
"""`ok`: usable. `note`: usable with a limitation. `problem`: must be fixed before a run."""


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check.

    Attributes:
        found: the value on this machine.
        wanted: the tested range, or the minimum value that a run needs.
        fix: one line that describes the fix, or an empty string if no change is needed.
    """

    name: str
    state: State
    found: str
    wanted: str = ""
    fix: str = ""
