"""Marks of parametrized cases that are left to `make test-exhaustive`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import product
from typing import Any

import pytest
from _pytest.mark import ParameterSet


def exhaustive_but(cases: Iterable[Any], *kept: Any) -> list[Any]:
    """Mark all cases but `kept` as exhaustive. They keep their other marks. A tuple is a case with several values."""
    params = [case if isinstance(case, ParameterSet) else pytest.param(*_values(case)) for case in cases]
    kept_values = {_values(case) for case in kept}
    assert kept_values <= {case.values for case in params}
    return [
        case if case.values in kept_values else pytest.param(*case.values, marks=[*case.marks, pytest.mark.exhaustive])
        for case in params
    ]


def _values(case: Any) -> tuple[Any, ...]:
    return case if isinstance(case, tuple) else (case,)


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
