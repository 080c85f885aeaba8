"""Where the models of a run start from, found and checked before anything starts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megarl.config.classifier import as_classifier
from megarl.config.rules import check_critic_model, check_model, check_reward_model
from megarl.config.schema import Config
from megarl.data.model_folder import read_config, resolve
from megarl.data.tokenizer import load_tokenizer
from megarl.resharding.selection import check_selections


@dataclass(frozen=True, slots=True)
class ModelFolders:
    """Hugging Face folders. critic, reward_model: None where the run has none."""

    actor: Path
    critic: Path | None
    reward_model: Path | None

    @property
    def hf_config(self) -> dict[str, Any]:
        """The actor's."""
        return read_config(self.actor)

    @property
    def trained(self) -> list[Path]:
        """Of the models that the run trains."""
        return [self.actor] if self.critic is None else [self.actor, self.critic]


def find_models(config: Config) -> ModelFolders:
    """Raises ValueError for a model that is not there, or does not fit the config or the actor."""
    actor = resolve(config.model.path)
    hf_config = read_config(actor)
    check_model(config, hf_config)
    check_selections(config.actor, hf_config)
    return ModelFolders(actor, _critic(config, actor, hf_config), _reward_model(config, actor, hf_config))


def _critic(config: Config, actor: Path, hf_config: Mapping[str, Any]) -> Path | None:
    """The actor's folder, unless it has a path of its own."""
    if not config.has_critic:
        return None
    folder = actor if config.critic.path is None else resolve(config.critic.path, key="critic.path")
    critic = read_config(folder)
    check_critic_model(config, hf_config, critic)
    check_selections(config.critic, as_classifier(critic))
    return folder


def _reward_model(config: Config, actor: Path, hf_config: Mapping[str, Any]) -> Path | None:
    if not config.has_reward_model:
        return None
    path = config.reward_model.path
    folder = resolve(path, key="reward_model.path")
    check_reward_model(config, hf_config, read_config(folder))
    if load_tokenizer(folder, key="reward_model.path").get_vocab() != load_tokenizer(actor).get_vocab():
        raise ValueError(
            f"reward_model.path={path}: its tokenizer is not that of model.path={config.model.path}, and it would read "
            "other text in the token ids that were sampled; take a reward model with the actor's tokenizer"
        )
    return folder
