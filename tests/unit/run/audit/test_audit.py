"""An audit accepts the files of every run, however often it was killed, and refuses every change to them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.run.audit.histories import History


@pytest.mark.parametrize("seed", range(50))
def test_killed_run_is_accepted(seed: int, tmp_path: Path) -> None:
    history = History(tmp_path, seed)
    is_proven, lines = history.audit()
    assert is_proven, lines
    print("\n".join(lines))
