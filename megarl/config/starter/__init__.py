"""The files that `megarl init` writes: a recipe with its own data and reward function."""

from __future__ import annotations

import json
import os
from pathlib import Path
from string import Template

from megarl.core.errors import UserError

TEMPLATES = Path(__file__).parent
RECIPE, REWARD, PROMPTS = "recipe.yaml", "reward.py", "prompts.jsonl"


def write(folder: Path) -> list[Path]:
    """Write the files into `folder`, which is created if missing, and return their paths, the recipe's first. Raise a
    UserError if a file already exists or the folder cannot be written; nothing is written then."""
    files = [folder / name for name in (RECIPE, REWARD, PROMPTS)]
    if taken := [str(file) for file in files if os.path.lexists(file)]:
        raise UserError(f"{' and '.join(taken)} already exist{'s' * (len(taken) == 1)}. Fix: choose another folder")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for file, text in zip(files, _texts(folder), strict=True):
            file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"{folder}: cannot be written ({error.strerror}). Fix: choose a writable folder") from None
    return files


def _texts(folder: Path) -> tuple[str, ...]:
    recipe, *others = (TEMPLATES.joinpath(name).read_text(encoding="utf-8") for name in (RECIPE, REWARD, PROMPTS))
    # A JSON string is also a YAML string, whatever characters the folder name contains.
    paths = {"prompts": str(folder / PROMPTS), "reward": f"{folder / REWARD}:reward"}
    quoted = {name: json.dumps(path, ensure_ascii=False) for name, path in paths.items()}
    return (Template(recipe).substitute(quoted), *others)
