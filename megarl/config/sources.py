"""The sources of data that are no files."""

from __future__ import annotations

OWN_TASKS = "environment"
"""The source of environments that make their own tasks."""


def reasoning_task(source: str) -> str | None:
    """Returns the name of a task of reasoning-gym, None for other sources."""
    package, separator, task = source.partition(":")
    return task if package == "reasoning_gym" and separator else None


def is_procedural(source: str) -> bool:
    """Returns whether rows are made, not read from a file."""
    return source in ("arithmetic", OWN_TASKS) or reasoning_task(source) is not None
