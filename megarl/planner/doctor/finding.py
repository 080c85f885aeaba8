"""The result of one check of `megarl doctor`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

State = Literal["ok", "note", "problem"]
"""`ok`: usable; `note`: usable, with a limitation; `problem`: has to be fixed before a run."""


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check.

    Attributes:
        found: the value on this machine.
        wanted: the tested range, or the minimum that a run needs.
        fix: one line that says how to fix it; empty if nothing has to change.
    """

    name: str
    state: State
    found: str
    wanted: str = ""
    fix: str = ""
