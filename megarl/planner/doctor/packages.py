"""What is installed, from the metadata of the packages: none of them is imported."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, distribution, version
from importlib.util import find_spec
from pathlib import Path

from packaging.specifiers import SpecifierSet

from megarl.planner.doctor.finding import Finding
from megarl.planner.doctor.ranges import APEX_FIX, PACKAGES, PYTHON, Package

APEX = "apex (NVIDIA)"
OF_NVIDIA_APEX = "optimizers"
"""A folder that NVIDIA Apex has, and PyPI's package of that name has not."""


def look_at_packages(has_gpu: bool) -> list[Finding]:
    return [python(platform.python_version()), *(look_at(tested, has_gpu) for tested in PACKAGES), apex(has_gpu)]


def python(found: str) -> Finding:
    if found in SpecifierSet(PYTHON, prereleases=True):
        return Finding("Python", "ok", found, PYTHON)
    return Finding("Python", "problem", found, PYTHON, "make an environment with Python 3.12, or 3.11 on CPU")


def look_at(tested: Package, has_gpu: bool) -> Finding:
    found = installed(tested.distributions)
    needed = has_gpu or not tested.on_gpu
    if found is None:
        if needed:
            return Finding(tested.name, "problem", "not installed", tested.versions, tested.fix)
        return Finding(tested.name, "note", "not installed; needed on GPUs", tested.versions)
    # A local version, such as 2.13.0+cpu, is of the release before its plus; a development version counts as its own.
    if found.partition("+")[0] in SpecifierSet(tested.versions, prereleases=True):
        if tested.compiled is not None and not is_compiled(*tested.compiled):
            state = "problem" if needed else "note"
            return Finding(tested.name, state, f"{found} without {tested.compiled[1]}", tested.versions, tested.fix)
        return Finding(tested.name, "ok", found, tested.versions)
    return Finding(tested.name, "problem", found, tested.versions, tested.fix)


def is_compiled(module: str, compiled: str) -> bool:
    """Returns whether the compiled module is there: by itself, or somewhere in the folder of the first."""
    spec = find_spec(module)
    folders = spec.submodule_search_locations or () if spec else ()
    return find_spec(compiled) is not None or any([*Path(folder).rglob(f"{compiled}*.so")] for folder in folders)


def installed(distributions: tuple[str, ...]) -> str | None:
    """Returns the version of the first of these that is installed."""
    for name in distributions:
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return None


def apex(has_gpu: bool) -> Finding:
    spec = find_spec("apex")
    if spec is None:
        without = "not installed; Transformer Engine's Adam is used" if has_gpu else "not installed; needed on GPUs"
        return Finding(APEX, "note", without)
    folders = [Path(folder) for folder in spec.submodule_search_locations or ()]
    if any((folder / OF_NVIDIA_APEX).is_dir() for folder in folders):
        return Finding(APEX, "ok", installed(("apex",)) or "built from source")
    found = (
        f"another project of that name, {distribution('apex').version}" if installed(("apex",)) else "another module"
    )
    return Finding(APEX, "problem", found, "NVIDIA Apex, or none", APEX_FIX)
