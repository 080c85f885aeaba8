"""The folders that the models of a run start from, found and checked before anything starts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, get_args

from megarl.config.model_schema import Role
from megarl.config.schema import Config
from megarl.core.errors import UserError
from megarl.models.folder import NotHere, config_here, read_config, resolve
from megarl.models.huggingface import Experts, completed, experts, left_out
from megarl.models.peft import check_adapter_config
from megarl.models.rules import check_critic_model, check_implicit_reward_model, check_model, check_reward_model
from megarl.models.tokenizer import load_tokenizer
from megarl.models.trained_model import trained_hf_config
from megarl.models.weights_hash import weights_hash


@dataclass(frozen=True, slots=True)
class ModelFolders:
    """Hugging Face folders of a run's models; None for a model that the run does not have."""

    actor: Path
    critic: Path | None
    reward_model: Path | None
    implicit_reward: Path | None

    def identify(self) -> dict[str, dict[str, str]]:
        """Return folder and hash of the weights of each model, by the key of its path. A model with the actor's folder
        is left out."""
        folders = {"model.path": self.actor}
        for name in ("critic", "reward_model", "implicit_reward"):
            if (folder := getattr(self, name)) not in (None, self.actor):
                folders[f"{name}.path"] = folder
        return {key: {"folder": str(folder), "hash": weights_hash(folder)} for key, folder in folders.items()}

    @property
    def hf_config(self) -> dict[str, Any]:
        """The config.json of the actor's model."""
        return read_config(self.actor)

    @property
    def experts(self) -> Experts | None:
        """Those of the actor's model."""
        return experts(completed(self.hf_config))

    def trained(self, config: Config) -> dict[Role, dict[str, Any]]:
        """Return the config of each model that the run trains, with the head that it is trained with."""
        folders = (self.actor, self.critic, self.implicit_reward)
        return {
            role: trained_hf_config(config, role, read_config(folder))
            for role, folder in zip(get_args(Role), folders, strict=True)
            if folder is not None
        }


def find_models(config: Config) -> ModelFolders:
    """Find all models of a run. Raises UserError for one that is missing, or does not fit the config or the actor."""
    actor = resolve(config.model.path, revision=config.model.revision)
    hf_config = read_config(actor)
    _check_actor(config, hf_config)
    folders = ModelFolders(
        actor=actor,
        critic=_critic(config, actor, hf_config),
        reward_model=_reward_model(config, actor, hf_config),
        implicit_reward=_implicit_reward(config, actor, hf_config),
    )
    _announce_left_out(folders)
    return folders


def check_models_here(config: Config) -> tuple[list[str], dict[Role, dict[str, Any]]]:
    """Check each config.json as `find_models` does, without a download or a conversion. Returns a line for each model,
    which says that it was checked or why it could not be, and the configs of the trained ones that are here, with their
    heads. Raises UserError as `find_models` does."""
    lines: list[str] = []
    found: dict[str, dict[str, Any]] = {}

    def look(
        key: str, path: str, check: Callable[[dict[str, Any]], None], revision: str | None = None
    ) -> dict[str, Any] | None:
        try:
            hf_config = config_here(path, key=key, revision=revision)
        except NotHere as why:
            lines.append(f"{key}={path}: not checked, as {why}")
            return None
        check(hf_config)
        lines.append(f"{key}={path}: the keys fit its config.json")
        return hf_config

    actor = look("model.path", config.model.path, partial(_check_actor, config), config.model.revision)
    if actor is None:
        return lines, {}  # the other models are checked against the actor
    found["actor"] = actor
    for there, placed, check in (
        (config.has_critic, config.critic, check_critic_model),
        (config.has_reward_model, config.reward_model, check_reward_model),
        (config.has_implicit_reward, config.implicit_reward, check_implicit_reward_model),
    ):
        if there and placed.path is None:
            check(config, actor, actor)
            found[placed.section] = actor
        elif there and (model := look(f"{placed.section}.path", placed.path, partial(check, config, actor))):
            found[placed.section] = model
    return lines, {role: trained_hf_config(config, role, found[role]) for role in get_args(Role) if role in found}


def _check_actor(config: Config, hf_config: dict[str, Any]) -> None:
    check_model(config, hf_config)
    if config.actor.adapters is not None and config.actor.lora.path is not None:
        check_adapter_config(Path(config.actor.lora.path).expanduser(), config.actor.lora)


def _announce_left_out(folders: ModelFolders) -> None:
    if part := left_out(folders.hf_config):
        print(f"model: {part} is neither trained nor exported", flush=True)
    for name in ("critic", "reward_model", "implicit_reward"):
        folder = getattr(folders, name)
        if folder is not None and (part := left_out(read_config(folder))):
            print(f"{name}: {part} is not used", flush=True)


def _critic(config: Config, actor: Path, hf_config: Mapping[str, Any]) -> Path | None:
    """Return the critic's folder: the actor's, unless the critic has a path of its own."""
    if not config.has_critic:
        return None
    folder = actor if config.critic.path is None else resolve(config.critic.path, key="critic.path")
    check_critic_model(config, hf_config, read_config(folder))
    return folder


def _reward_model(config: Config, actor: Path, hf_config: Mapping[str, Any]) -> Path | None:
    if not config.has_reward_model:
        return None
    folder = resolve(config.reward_model.path, key="reward_model.path")
    check_reward_model(config, hf_config, read_config(folder))
    if config.reward_model.input_format == "ids":
        remedy = "reward_model.input_format=text or chat, or take a model with the actor's tokenizer"
        _check_tokenizer(config, "reward_model.path", config.reward_model.path, folder, actor, f"set {remedy}")
    else:
        _check_reader(config, folder)
    return folder


def _check_reader(config: Config, folder: Path) -> None:
    """Raise UserError for a tokenizer that cannot read samples as the config wants."""
    tokenizer, reads = load_tokenizer(folder, "reward_model.path"), config.reward_model.input_format
    if reads != "question" and not tokenizer.is_fast:
        raise UserError(
            f"reward_model.input_format={reads}: the tokenizer of {folder} does not tell which text a token is of; take a "
            "model with a tokenizer.json"
        )
    if reads != "text" and tokenizer.chat_template is None:
        remedy = "set reward_model.input_format=text" if reads == "chat" else "take an instruction-tuned model"
        raise UserError(f"reward_model.input_format={reads}: the tokenizer of {folder} has no chat template; {remedy}")


def _implicit_reward(config: Config, actor: Path, hf_config: Mapping[str, Any]) -> Path | None:
    """Return the implicit reward model's folder: the actor's, unless it has a path of its own."""
    path = config.implicit_reward.path
    if not config.has_implicit_reward:
        return None
    folder = actor if path is None else resolve(path, key="implicit_reward.path")
    check_implicit_reward_model(config, hf_config, read_config(folder))
    if path is not None:
        remedy = "take a model with the actor's tokenizer"
        _check_tokenizer(config, "implicit_reward.path", path, folder, actor, remedy)
    return folder


def _check_tokenizer(config: Config, key: str, path: str, folder: Path, actor: Path, remedy: str) -> None:
    if load_tokenizer(folder, key).get_vocab() != load_tokenizer(actor).get_vocab():
        raise UserError(
            f"{key}={path}: its tokenizer is not that of model.path={config.model.path}, and it would read other text "
            f"in the token ids that were sampled; {remedy}"
        )
