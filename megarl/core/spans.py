"""Contiguous spans of devices, as ranges of their indices."""

from __future__ import annotations


def overlap(one: range, other: range) -> bool:
    """Return whether two spans share a device."""
    return max(one.start, other.start) < min(one.stop, other.stop)
