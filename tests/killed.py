"""Simulates a kill at any change to the file system."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest


class Killed(BaseException):
    """Simulates a killed process. It is a BaseException, so that no `except Exception` catches it."""


def killed_after(limit: int, operation: Callable[[], object]) -> bool:
    """Run the operation and interrupt it before change `limit` + 1 to the file system. Return whether it was killed."""
    left = limit

    def counted(inner):
        def call(*args, **kwargs):
            nonlocal left
            if left == 0:
                raise Killed
            left -= 1
            return inner(*args, **kwargs)

        return call

    with pytest.MonkeyPatch.context() as monkeypatch:
        for name in ("mkdir", "rename", "replace", "write_bytes", "write_text", "symlink_to"):
            monkeypatch.setattr(Path, name, counted(getattr(Path, name)))
        for name in ("fsync", "unlink", "rmdir"):  # rmtree calls them once per file or folder
            monkeypatch.setattr(os, name, counted(getattr(os, name)))
        try:
            operation()
        except Killed:
            return True
    return False
