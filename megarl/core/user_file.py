"""The user's Python files that a configuration names as `path/to/file.py:NAME`."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from megarl.core.errors import UserError


def is_in_file(name: str) -> bool:
    """Return whether a name is a user's `path/to/file.py:NAME`; other names are megarl's own."""
    return ":" in name


def defined_in_file(key: str, name: str) -> tuple[Path, str, Any]:
    """Import the file of `path/to/file.py:NAME`. Raise a UserError if the file does not exist or cannot be imported.

    Args:
        key: the configuration key that has this value, for error messages.

    Returns:
        The file, NAME, and the object that the file defines under that name; None if it defines none.
    """
    file, _, inner = name.rpartition(":")
    path = Path(file).expanduser()
    if path.suffix != ".py" or not path.is_file():
        raise UserError(f"{key}: {path} is not a Python file. Fix: use the path of an existing .py file")
    return path, inner, getattr(_load(key, path), inner, None)


def _load(key: str, path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"file of {key} {path.resolve()}", path)
    assert spec is not None and spec.loader is not None, f"no loader for {path}"
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look up the module in sys.modules
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # the user's code may raise anything
        fix = "resolve this error in the file"
        if isinstance(error, ModuleNotFoundError):
            fix = "install the module, or add its directory to PYTHONPATH"
        raise UserError(f"{key}: importing {path} raised {type(error).__name__}: {error}. Fix: {fix}") from error
    return module
