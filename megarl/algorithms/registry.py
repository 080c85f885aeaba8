"""The estimators and the objectives, found by walking their folders: one file for each, whose SPEC has the file's name.

They are ordered by kind, and within a kind by name.
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


def find(package: ModuleType, kind: type[Spec], place: Callable[[Spec], int]) -> dict[str, Spec]:
    """Return the specs by name. place: the position of a spec's kind in the order. Raises ImportError for a file
    without a SPEC of the file's name, and for a name that two folders have."""
    specs = list(_specs(package, kind))
    twice = {spec.name for spec in specs if [other.name for other in specs].count(spec.name) > 1}
    if twice:
        raise ImportError(f"{package.__name__}: more than one file is named {', '.join(sorted(twice))}")
    return {spec.name: spec for spec in sorted(specs, key=lambda spec: (place(spec), spec.name))}


def _specs(package: ModuleType, kind: type[Spec]) -> Iterator[Spec]:
    for name in [module.name for folder in package.__path__ for module in iter_modules([folder])]:
        spec = getattr(import_module(f"{package.__name__}.{name}"), "SPEC", None)
        if not isinstance(spec, kind):
            raise ImportError(f"{package.__name__}.{name}: it has no SPEC that is a {kind.__name__}")
        if spec.name != name:
            raise ImportError(f"{package.__name__}.{name}: its SPEC is named {spec.name}; give both the same name")
        yield spec


ESTIMATORS: Mapping[str, EstimatorSpec] = find(
    advantages, EstimatorSpec, lambda spec: list(BASELINE_KINDS).index(spec.comparison)
)
OBJECTIVES: Mapping[str, ObjectiveSpec] = find(
    objectives, ObjectiveSpec, lambda spec: get_args(Rows).index(spec.rows[0])
)
