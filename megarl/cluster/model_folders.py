"""Where the models of a run start from, found and checked before anything starts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megarl.config.classifier import as_classifier
from megarl.config.huggingface import left_out
from megarl.config.model_rules import check_critic_model, check_implicit_reward_model, check_model, check_reward_model
from megarl.config.schema import Config, Role
from megarl.config.value_head import with_value_head
from megarl.data.model_folder import read_config, resolve
from megarl.data.tokenizer import load_tokenizer
from megarl.resharding.selection import check_selections


@dataclass(frozen=True, slots=True)
class ModelFolders:
    """Hugging Face folders. All but the actor's: None where the run has no such model."""

    actor: Path
    critic: Path | None
    reward_model: Path | None
    implicit_reward: Path | None

    @property
    def hf_config(self) -> dict[str, Any]:
        """The actor's."""
        return read_config(self.actor)

    def trained(self, config: Config) -> dict[Role, dict[str, Any]]:
        """Config of each model that the run trains, with the head that it is trained with."""
        actor = trained_hf_config(config, self.actor)
        found: dict[Role, dict[str, Any]] = {"actor": with_value_head(actor) if config.actor_has_values else actor}
        if self.critic is not None:
            found["critic"] = as_classifier(read_config(self.critic))
        if self.implicit_reward is not None:
            found["implicit_reward"] = read_config(self.implicit_reward)
        return found


def find_models(config: Config) -> ModelFolders:
    """Raises ValueError for a model that is not there, or does not fit the config or the actor."""
    actor = resolve(config.model.path)
    hf_config = read_config(actor)
    check_model(config, hf_config)
    check_selections(config.actor, trained_hf_config(config, actor))
    folders = ModelFolders(
        actor=actor,
        critic=_critic(config, actor, hf_config),
        reward_model=_reward_model(config, actor, hf_config),
        implicit_reward=_implicit_reward(config, actor, hf_config),
    )
    _announce_left_out(folders)
    return folders


def trained_hf_config(config: Config, actor: Path) -> dict[str, Any]:
    """The actor's config.json once it is trained: that of a classifier if it becomes a reward model."""
    hf_config = read_config(actor)
    return as_classifier(hf_config) if config.trains_reward_model else hf_config


def _announce_left_out(folders: ModelFolders) -> None:
    if part := left_out(folders.hf_config):
        print(f"model: {part} is neither trained nor exported", flush=True)
    for name in ("critic", "reward_model", "implicit_reward"):
        folder = getattr(folders, name)
        if folder is not None and (part := left_out(read_config(folder))):
            print(f"{name}: {part} is not used", flush=True)


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
    folder = resolve(config.reward_model.path, key="reward_model.path")
    check_reward_model(config, hf_config, read_config(folder))
    if config.reward_model.reads == "ids":
        remedy = "reward_model.reads=text or chat, or take a model with the actor's tokenizer"
        _check_tokenizer(config, "reward_model.path", config.reward_model.path, folder, actor, f"set {remedy}")
    else:
        _check_reader(config, folder)
    return folder


def _check_reader(config: Config, folder: Path) -> None:
    """Raises ValueError for a tokenizer that cannot read samples as the config wants."""
    tokenizer, reads = load_tokenizer(folder, "reward_model.path"), config.reward_model.reads
    if not tokenizer.is_fast:
        raise ValueError(
            f"reward_model.reads={reads}: the tokenizer of {folder} does not tell which text a token is of; take a "
            "model with a tokenizer.json"
        )
    if reads == "chat" and tokenizer.chat_template is None:
        raise ValueError(
            f"reward_model.reads=chat: the tokenizer of {folder} has no chat template; set reward_model.reads=text"
        )


def _implicit_reward(config: Config, actor: Path, hf_config: Mapping[str, Any]) -> Path | None:
    """The actor's folder, unless it has a path of its own."""
    path = config.implicit_reward.path
    if not config.has_implicit_reward:
        return None
    folder = actor if path is None else resolve(path, key="implicit_reward.path")
    check_implicit_reward_model(config, hf_config, read_config(folder))
    check_selections(config.implicit_reward, read_config(folder))
    if path is not None:
        remedy = "take a model with the actor's tokenizer"
        _check_tokenizer(config, "implicit_reward.path", path, folder, actor, remedy)
    return folder


def _check_tokenizer(config: Config, key: str, path: str, folder: Path, actor: Path, remedy: str) -> None:
    if load_tokenizer(folder, key).get_vocab() != load_tokenizer(actor).get_vocab():
        raise ValueError(
            f"{key}={path}: its tokenizer is not that of model.path={config.model.path}, and it would read other text "
            f"in the token ids that were sampled; {remedy}"
        )
