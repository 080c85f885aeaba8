"""The files that `megarl init` writes: a recipe with its own data and reward function."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from megarl.core.errors import UserError

TEMPLATES = Path(__file__).parent
NAMES = ("recipe.yaml", "reward.py", "prompts.jsonl")


def write(folder: Path) -> list[Path]:
    """Write the files into `folder`, creating it if missing, and return their paths, the recipe's first. Raise a
    UserError if a file already exists or the folder cannot be written. Existing files stay unchanged."""
    files = [folder / name for name in NAMES]
    if taken := [str(file) for file in files if os.path.lexists(file)]:
        raise UserError(f"{' and '.join(taken)} already exist{'s' * (len(taken) == 1)}. Fix: choose another folder")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for file in files:
            shutil.copyfile(TEMPLATES / file.name, file)
    except OSError as error:
        raise UserError(f"{folder}: cannot be written ({error.strerror}). Fix: choose a writable folder") from None
    return files
