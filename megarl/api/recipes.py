"""Load recipes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megarl.config.load import load
from megarl.config.schema import Config

NO_OVERRIDES: Mapping[str, Any] = {}


def load_config(recipe: str | Path, overrides: Mapping[str, Any] = NO_OVERRIDES) -> Config:
    """Load and validate a recipe, such as `configs/quickstart.yaml`.

    Args:
        overrides: values by dotted key, such as `{"run.steps": 3, "actor.optimizer.lr": 1e-6}`. None stands for null. A
            mapping is merged into its section; a list replaces the whole value. Relative paths are relative to the
            working directory.

    Raises:
        UserError: the recipe is invalid. The message has one line for each problem, with the key, the value and a
            remedy.
    """
    values = {key: str(value) if isinstance(value, Path) else value for key, value in overrides.items()}
    return load(Path(recipe), values)
