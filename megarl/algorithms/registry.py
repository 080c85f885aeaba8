"""Estimators and objectives by name.

megarl's entries are discovered in their packages, where each file defines a SPEC with the file's name, and sorted by
kind, then by name. A user's entry is `path/to/file.py:NAME`, where NAME is a spec defined in that file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import cache
from hashlib import sha256
from importlib import import_module
from inspect import signature
from pkgutil import iter_modules
from types import ModuleType
from typing import TypeVar, get_args

from megarl.algorithms import advantages, objectives
from megarl.algorithms.specs import BASELINE_KINDS, EstimatorSpec, ObjectiveSpec, Rows, Spec
from megarl.core.errors import UserError
from megarl.core.user_file import defined_in_file

AnySpec = TypeVar("AnySpec", bound=Spec)


def find(package: ModuleType, kind: type[AnySpec], rank: Callable[[AnySpec], int]) -> dict[str, AnySpec]:
    """Return the specs in a package by name. Raise an ImportError if a file has no SPEC named after it, or if a name
    exists in two folders.

    Args:
        kind: the class that each SPEC must be an instance of.
        rank: returns the sort position of a spec's kind.
    """
    specs = list(_specs(package, kind))
    duplicates = {spec.name for spec in specs if [other.name for other in specs].count(spec.name) > 1}
    if duplicates:
        raise ImportError(f"{package.__name__}: several files define {', '.join(sorted(duplicates))}")
    return {spec.name: spec for spec in sorted(specs, key=lambda spec: (rank(spec), spec.name))}


def _specs(package: ModuleType, kind: type[AnySpec]) -> Iterator[AnySpec]:
    for name in [module.name for folder in package.__path__ for module in iter_modules([folder])]:
        spec = getattr(import_module(f"{package.__name__}.{name}"), "SPEC", None)
        if not isinstance(spec, kind):
            raise ImportError(f"{package.__name__}.{name}: missing SPEC. Fix: define SPEC as a {kind.__name__}")
        if spec.name != name:
            raise ImportError(
                f"{package.__name__}.{name}: SPEC.name={spec.name} differs from the file name. Fix: set SPEC.name to "
                f"{name}"
            )
        yield spec


ESTIMATORS: Mapping[str, EstimatorSpec] = find(
    advantages, EstimatorSpec, lambda spec: list(BASELINE_KINDS).index(spec.comparison)
)
OBJECTIVES: Mapping[str, ObjectiveSpec] = find(
    objectives, ObjectiveSpec, lambda spec: get_args(Rows).index(spec.rows[0])
)


@cache
def spec_in_file(key: str, name: str, kind: type[AnySpec]) -> tuple[AnySpec, str]:
    """Return the spec that `path/to/file.py:NAME` refers to, and the file's SHA-256. Raise a UserError that names the
    configuration key if the file does not define the spec, or if the spec's functions do not accept its parameters."""
    path, inner, spec = defined_in_file(key, name)
    if not isinstance(spec, kind):
        kinds = " or ".join(subclass.__name__ for subclass in kind.__subclasses__())
        raise UserError(
            f"{key}={name}: {path} defines no {inner} of type {kind.__name__}. Fix: define {inner} as a {kinds}"
        )
    for function, num_positional, parameters in spec.functions:
        try:
            signature(function).bind(*range(num_positional), **parameters)
        except TypeError as error:
            keywords = f"the keyword arguments {', '.join(parameters)}" if parameters else "no keyword arguments"
            raise UserError(
                f"{key}={name}: megarl calls {function.__name__}{signature(function)} with {num_positional} positional "
                f"arguments and {keywords}, which fails: {error}. Fix: accept these arguments in "
                f"{function.__name__}, or change the parameters of {inner}"
            ) from None
    return spec, sha256(path.read_bytes()).hexdigest()
