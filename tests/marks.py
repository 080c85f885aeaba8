"""Cases for which others stand in `make test`; `make test-exhaustive` runs them. And cases that stand for others in
`make test-newest`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def exhaustive_but(cases: Iterable[Any], *kept: str) -> list[Any]:
    """Cases that are marked already, such as newest_of's, are kept, too."""
    return [
        case if case in kept or not isinstance(case, str) else pytest.param(case, marks=pytest.mark.exhaustive)
        for case in cases
    ]


def newest_of(cases: Iterable[str], *representatives: str) -> list[Any]:
    assert set(representatives) <= set(cases)
    return [pytest.param(case, marks=pytest.mark.newest) if case in representatives else case for case in cases]
