"""Data sources that are not files."""

from __future__ import annotations

OWN_TASKS = "environment"
"""The source for environments that generate their own tasks."""


def reasoning_task(source: str) -> str | None:
    """Return the reasoning-gym task that a source names, None for other sources."""
    package, separator, task = source.partition(":")
    return task if package == "reasoning_gym" and separator else None


def is_procedural(source: str) -> bool:
    """Return whether rows are generated rather than read from a file."""
    return source in ("arithmetic", OWN_TASKS) or reasoning_task(source) is not None
