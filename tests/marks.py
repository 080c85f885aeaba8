"""Marks of parametrized cases that are left to `make test-exhaustive`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import product
from typing import Any

import pytest
from _pytest.mark import ParameterSet


def exhaustive_but(cases: Iterable[Any], *kept: str) -> list[Any]:
    """Mark all cases but `kept` as exhaustive. They keep their other marks."""
    params = [case if isinstance(case, ParameterSet) else pytest.param(case) for case in cases]
    names = [case.values[0] for case in params]
    assert set(kept) <= set(names)
    return [
        case if name in kept else pytest.param(name, marks=[*case.marks, pytest.mark.exhaustive])
        for name, case in zip(names, params, strict=True)
    ]


def every_third(cases: Iterable[Any]) -> list[Any]:
    """Mark all cases but every third as exhaustive."""
    return [pytest.param(case, marks=() if i % 3 == 0 else pytest.mark.exhaustive) for i, case in enumerate(cases)]


def each_value(*axes: Sequence[Any]) -> list[Any]:
    """Return the product of the axes. A few cases cover each value of each axis: as many as the longest axis has
    values. All other cases are marked as exhaustive."""
    kept = {tuple(i % len(axis) for axis in axes) for i in range(max(map(len, axes)))}
    return [
        pytest.param(
            *(axis[i] for axis, i in zip(axes, indices, strict=True)),
            marks=() if indices in kept else pytest.mark.exhaustive,
        )
        for indices in product(*(range(len(axis)) for axis in axes))
    ]
