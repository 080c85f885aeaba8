"""Spans of devices, as ranges of their numbers."""

from __future__ import annotations


def overlap(one: range, other: range) -> bool:
    """Returns whether two spans have a device in common."""
    return max(one.start, other.start) < min(one.stop, other.stop)
