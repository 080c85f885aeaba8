"""Registry of estimators and objectives, discovered from their packages: one file each, whose SPEC has the file's name.

Entries are sorted by kind, then by name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from pkgutil import iter_modules
from types import ModuleType
from typing import TypeVar, get_args

from megarl.algorithms import advantages, objectives
from megarl.algorithms.specs import BASELINE_KINDS, EstimatorSpec, ObjectiveSpec, Rows

Spec = TypeVar("Spec", EstimatorSpec, ObjectiveSpec)


def find(package: ModuleType, kind: type[Spec], rank: Callable[[Spec], int]) -> dict[str, Spec]:
    """Return the specs of a package by name.

    Args:
        kind: the class that each SPEC must be an instance of.
        rank: returns the sort position of a spec's kind.

    Raises:
        ImportError: a file has no SPEC named after it, or a name exists in two folders.
    """
    specs = list(_specs(package, kind))
    duplicates = {spec.name for spec in specs if [other.name for other in specs].count(spec.name) > 1}
    if duplicates:
        raise ImportError(f"{package.__name__}: more than one file has the name {', '.join(sorted(duplicates))}")
    return {spec.name: spec for spec in sorted(specs, key=lambda spec: (rank(spec), spec.name))}


def _specs(package: ModuleType, kind: type[Spec]) -> Iterator[Spec]:
    for name in [module.name for folder in package.__path__ for module in iter_modules([folder])]:
        spec = getattr(import_module(f"{package.__name__}.{name}"), "SPEC", None)
        if not isinstance(spec, kind):
            raise ImportError(f"{package.__name__}.{name}: missing SPEC. Fix: define SPEC as a {kind.__name__}")
        if spec.name != name:
            raise ImportError(
                f"{package.__name__}.{name}: SPEC.name={spec.name}: differs from the file's name. Fix: set it to {name}"
            )
        yield spec


ESTIMATORS: Mapping[str, EstimatorSpec] = find(
    advantages, EstimatorSpec, lambda spec: list(BASELINE_KINDS).index(spec.comparison)
)
OBJECTIVES: Mapping[str, ObjectiveSpec] = find(
    objectives, ObjectiveSpec, lambda spec: get_args(Rows).index(spec.rows[0])
)
