"""Runs the `megarl` command in this process."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from megarl import cli


def run_command(*arguments: str | Path) -> int:
    """Run `megarl ARGUMENTS` and return its exit code."""
    with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit) as exit:
        patch.setattr(sys, "argv", ["megarl", *map(str, arguments)])
        cli.main()
    return int(exit.value.code or 0)
