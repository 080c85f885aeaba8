from __future__ import annotations

import pytest

from megarl.core.errors import UserError
from megarl.launch.request import time_limit_s


@pytest.mark.parametrize(
    ("time", "expected"),
    [
        ("90", 90 * 60),
        ("2:30", 150),
        ("4:00:00", 4 * 3600),
        ("1-12", 36 * 3600),
        ("1-00:30", 24 * 3600 + 1800),
        ("2-01:02:03", 49 * 3600 + 123),
    ],
)
def test_time_limit_parses_slurm_formats(time: str, expected: int) -> None:
    assert time_limit_s(time) == expected


@pytest.mark.parametrize("time", ["", "soon", "4h", "1:2:3:4", "-5"])
def test_invalid_time_limit_is_rejected(time: str) -> None:
    with pytest.raises(UserError, match=f"--time={time}: expected minutes"):
        time_limit_s(time)
