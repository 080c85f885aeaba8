"""Versions of installed packages, read from their metadata without importing them."""

from __future__ import annotations

import platform
from collections.abc import Iterable
from functools import cache
from importlib import metadata

import megarl


def installed_versions(packages: Iterable[str]) -> dict[str, str | None]:
    """Return the versions of Python, megarl and the given distributions; None for a distribution that is not
    installed."""
    versions: dict[str, str | None] = {"python": platform.python_version(), "megarl": megarl.__version__}
    return versions | {name: _version(name) for name in packages}


@cache
def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
