"""Versions of installed packages, by their metadata: nothing is imported."""

from __future__ import annotations

import platform
from collections.abc import Iterable
from importlib import metadata

import megarl


def installed_versions(packages: Iterable[str]) -> dict[str, str | None]:
    """Returns the versions of Python, of megarl and of these distributions, None for one that is not installed."""
    versions: dict[str, str | None] = {"python": platform.python_version(), "megarl": megarl.__version__}
    for name in packages:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = None
    return versions
