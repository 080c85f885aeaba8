"""Marks of parametrised cases: those left to `make test-exhaustive`, and those that `make test-newest` runs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def exhaustive_but(cases: Iterable[Any], *kept: str) -> list[Any]:
    """Mark all cases but `kept` as exhaustive. Cases that already carry marks, such as newest_of's, are unchanged."""
    return [
        case if case in kept or not isinstance(case, str) else pytest.param(case, marks=pytest.mark.exhaustive)
        for case in cases
    ]


def newest_of(cases: Iterable[str], *representatives: str) -> list[Any]:
    """Mark the representatives for `make test-newest`."""
    assert set(representatives) <= set(cases)
    return [pytest.param(case, marks=pytest.mark.newest) if case in representatives else case for case in cases]
