"""Cases for which others stand in `make test`; `make test-exhaustive` runs them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def exhaustive_but(cases: Iterable[str], *kept: str) -> list[Any]:
    return [case if case in kept else pytest.param(case, marks=pytest.mark.exhaustive) for case in cases]
