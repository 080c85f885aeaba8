"""Checks installed packages based on their metadata, without importing them."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, distribution, version
from importlib.util import find_spec
from pathlib import Path

from packaging.specifiers import SpecifierSet

from megarl.planner.doctor import Finding
from megarl.planner.doctor.ranges import APEX_FIX, PACKAGES, PYTHON, Package

APEX = "apex (NVIDIA)"
NVIDIA_APEX_FOLDER = "optimizers"
"""A folder that exists in NVIDIA Apex but not in the PyPI package of the same name."""


def check_packages(has_gpu: bool) -> list[Finding]:
    return [python(platform.python_version()), *(check_package(tested, has_gpu) for tested in PACKAGES), apex(has_gpu)]


def python(found: str) -> Finding:
    if found in SpecifierSet(PYTHON, prereleases=True):
        return Finding("Python", "ok", found, PYTHON)
    return Finding("Python", "problem", found, PYTHON, "create an environment with Python 3.12, or 3.11 on CPU")


def check_package(tested: Package, has_gpu: bool) -> Finding:
    found = installed(tested.distributions)
    needed = has_gpu or not tested.on_gpu
    if found is None:
        if needed:
            return Finding(tested.name, "problem", "not installed", tested.versions, tested.fix)
        return Finding(tested.name, "note", "not installed; needed on GPUs", tested.versions)
    # Ignore the local part of versions such as 2.13.0+cpu. Development versions are compared unchanged.
    if found.partition("+")[0] in SpecifierSet(tested.versions, prereleases=True):
        if tested.compiled is not None and not is_compiled(*tested.compiled):
            state = "problem" if needed else "note"
            return Finding(tested.name, state, f"{found} without {tested.compiled[1]}", tested.versions, tested.fix)
        return Finding(tested.name, "ok", found, tested.versions)
    return Finding(tested.name, "problem", found, tested.versions, tested.fix)


def is_compiled(module: str, compiled: str) -> bool:
    """Return whether the compiled extension exists, either as a top-level module or in the folder of `module`."""
    spec = find_spec(module)
    folders = spec.submodule_search_locations or () if spec else ()
    return find_spec(compiled) is not None or any([*Path(folder).rglob(f"{compiled}*.so")] for folder in folders)


def installed(distributions: tuple[str, ...]) -> str | None:
    """Return the version of the first installed distribution in `distributions`, or None if none is installed."""
    for name in distributions:
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return None


def apex(has_gpu: bool) -> Finding:
    spec = find_spec("apex")
    if spec is None:
        effect = "runs use Transformer Engine's Adam" if has_gpu else "needed on GPUs"
        return Finding(APEX, "note", f"not installed; {effect}")
    folders = [Path(folder) for folder in spec.submodule_search_locations or ()]
    if any((folder / NVIDIA_APEX_FOLDER).is_dir() for folder in folders):
        return Finding(APEX, "ok", installed(("apex",)) or "built from source")
    found = (
        f"a different project named apex, {distribution('apex').version}"
        if installed(("apex",))
        else "a different module named apex"
    )
    return Finding(APEX, "problem", found, "NVIDIA Apex, or no apex", APEX_FIX)
