"""Name models in errors."""

from __future__ import annotations

from megarl.config.model_schema import Critic, ImplicitReward, Placed, RewardModel, Teachers
from megarl.config.schema import Config


def path_of(config: Config, placed: Placed) -> str:
    """Return the config key of the model's path, and its value. Teachers are passed one by one; see Teachers.only."""
    if isinstance(placed, Teachers):
        return f"path={placed.models[0].path}"
    path = placed.path if isinstance(placed, Critic | ImplicitReward | RewardModel) else None
    return f"model.path={config.model.path}" if path is None else f"{placed.section}.path={path}"
