"""What `megarl init` writes: a recipe with data and a reward function of one's own, to be changed from there."""

from __future__ import annotations

import json
import os
from pathlib import Path
from string import Template

from megarl.core.errors import UserError

TEMPLATES = Path(__file__).parent
RECIPE, REWARD, PROMPTS = "recipe.yaml", "reward.py", "prompts.jsonl"


def write(folder: Path) -> list[Path]:
    """Writes the files into the folder, made where it is missing, and returns their paths, the recipe's first. Raises
    UserError where one of them is already there, and for a folder that cannot be written; nothing is written then."""
    files = [folder / name for name in (RECIPE, REWARD, PROMPTS)]
    if taken := [str(file) for file in files if os.path.lexists(file)]:
        raise UserError(f"{' and '.join(taken)}: already there, and nothing is overwritten; name another folder")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for file, text in zip(files, _texts(folder), strict=True):
            file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"{folder}: it cannot be written ({error.strerror}); name a folder of yours") from None
    return files


def _texts(folder: Path) -> tuple[str, ...]:
    recipe, *others = (TEMPLATES.joinpath(name).read_text(encoding="utf-8") for name in (RECIPE, REWARD, PROMPTS))
    # JSON's text in quotes is YAML's, too, whatever the folder's name has in it.
    paths = {"prompts": str(folder / PROMPTS), "reward": f"{folder / REWARD}:reward"}
    quoted = {name: json.dumps(path, ensure_ascii=False) for name, path in paths.items()}
    return (Template(recipe).substitute(quoted), *others)
