"""Convert configs from checkpoints in earlier formats: add newer keys and remove obsolete ones."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from megarl.config.algorithm_schema import Advantage, Objective
from megarl.config.schema import Config
from megarl.core.checkpoint import FORMAT
from megarl.core.errors import UserError
from megarl.core.files import is_plain
from megarl.core.user_file import is_in_file

ADDED: Mapping[int, Mapping[str, Any]] = {}
"""Format version -> keys added in it, each with the value that reproduces the behavior of earlier runs, even if
base.yaml has a different default. `rewards.functions[].name` stands for the key `name` in each list item."""

REMOVED: Mapping[int, tuple[str, ...]] = {}
"""Format version -> keys removed in it."""


def complete(saved: Mapping[str, Any], version: int) -> dict[str, Any]:
    """Convert a config that was saved in format `version` to the current format."""
    config = deepcopy(dict(saved))
    for later in range(version + 1, FORMAT + 1):
        for key, value in ADDED.get(later, {}).items():
            for section, name in _sections(config, key):
                section.setdefault(name, deepcopy(value))
        for key in REMOVED.get(later, ()):
            for section, name in _sections(config, key):
                section.pop(name, None)
    return config


def invalid_value(saved: Any) -> tuple[str, Any, str] | None:
    """Return the key, the value and the problem of the first invalid part of a saved config, or None if
    `check_continues` can compare the config."""
    if not isinstance(saved, dict):
        return "config", saved, "is not an object"
    for name, field in Config.model_fields.items():
        if field.annotation is not str and not isinstance(saved.get(name), dict):
            return f"config.{name}", saved.get(name), "is not an object"
    steps = saved["run"].get("steps")
    return None if is_plain(steps, int) and steps > 0 else ("config.run.steps", steps, "is not a positive integer")


def _sections(config: dict[str, Any], key: str) -> Iterator[tuple[dict[str, Any], str]]:
    """Yield each section that has the key, and the last part of the key. Missing sections are created."""
    part, _, rest = key.partition(".")
    if not rest:
        yield config, part
    elif part.endswith("[]"):
        for entry in config.get(part.removesuffix("[]"), []):
            yield from _sections(entry, rest)
    else:
        yield from _sections(config.setdefault(part, {}), rest)


def validated(saved: Any, version: int, path: Path, fix: str = "use the version that the run used") -> Config:
    """Return the configuration of a checkpoint that is only read, not resumed. Files that it names are not executed,
    because anyone may have written the checkpoint: the base recipe's entries replace a user's estimator and objective.
    Raise a UserError that names `path` and ends with the remedy `fix` if it is not valid."""
    try:
        config = complete(saved, version)
        for variant, default in ((Advantage, "grpo"), (Objective, "clip")):
            section = config["algorithm"][variant.key.split(".")[1]]
            if is_in_file(section[variant.discriminator]):
                fields = {name: value for name, value in section.items() if name in variant.model_fields}
                config["algorithm"][variant.key.split(".")[1]] = fields | {variant.discriminator: default}
        return Config.model_validate(config)
    except (ValidationError, ValueError, LookupError, TypeError, AttributeError):
        raise UserError(f"{path}: contains no config that this version of megarl can read. Fix: {fix}") from None
