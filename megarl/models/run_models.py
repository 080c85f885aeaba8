"""Find and check a run's models before any process starts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, get_args

from megarl.config.model_schema import Role, teacher_key
from megarl.config.schema import Config
from megarl.core.errors import UserError
from megarl.models.denoiser import DenoiserShape, is_denoiser, pixels_per_latent
from megarl.models.families import completed
from megarl.models.folder import DRAFT_KEY, ModelNotLocal, read_config, read_local_config, resolve, vocab_size
from megarl.models.huggingface import Experts, experts, linear_attention, untrained_part
from megarl.models.peft import check_adapter_config
from megarl.models.rules import (
    check_critic_model,
    check_images,
    check_implicit_reward_model,
    check_model,
    check_reward_model,
    check_teacher_model,
)
from megarl.models.rules.draft import check_draft_model
from megarl.models.shape import ModelShape
from megarl.models.tokenizer import load_tokenizer
from megarl.models.trained_model import policy_hf_config, trained_hf_config
from megarl.models.weights_hash import weights_hash


@dataclass(frozen=True, slots=True)
class ModelFolders:
    """Hugging Face folders of a run's models. None: the run does not have this model."""

    actor: Path
    critic: Path | None
    reward_model: Path | None
    implicit_reward: Path | None
    draft: Path | None = None
    teachers: Mapping[str, Path] = field(default_factory=dict)
    """Name -> folder of each teacher, in the order of teachers.models."""

    @property
    def others(self) -> dict[str, Path]:
        """Config key of the path -> folder of each model besides the actor and the draft model."""
        folders = {
            "critic.path": self.critic,
            "reward_model.path": self.reward_model,
            "implicit_reward.path": self.implicit_reward,
            **{teacher_key(name): folder for name, folder in self.teachers.items()},
        }
        return {key: folder for key, folder in folders.items() if folder is not None}

    def identify(self) -> dict[str, dict[str, str]]:
        """Return config key of the path -> folder and hash of the weights, without models in the actor's folder."""
        others = {key: folder for key, folder in self.others.items() if folder != self.actor}
        folders = {"model.path": self.actor} | others
        return {key: {"folder": str(folder), "hash": weights_hash(folder)} for key, folder in folders.items()}

    @property
    def hf_config(self) -> dict[str, Any]:
        """The config.json of the actor's model."""
        return read_config(self.actor)

    @property
    def experts(self) -> Experts | None:
        return None if is_denoiser(self.hf_config) else experts(completed(self.hf_config))

    @property
    def teacher_configs(self) -> dict[str, dict[str, Any]]:
        """The config.json of each teacher by name."""
        return {name: read_config(folder) for name, folder in self.teachers.items()}

    def teacher_hidden_sizes(self, config: Config) -> list[int]:
        """Return the hidden size of each teacher. Teachers without a path have the actor's."""
        own = [self.hf_config] * len(config.self_teachers)
        return [ModelShape.of(hf_config).hidden for hf_config in (*self.teacher_configs.values(), *own)]

    def trained(self, config: Config) -> dict[Role, dict[str, Any]]:
        """Return the Hugging Face config of each trained model, including the heads used in training."""
        folders = (self.actor, self.critic, self.implicit_reward)
        return {
            role: trained_hf_config(config, role, read_config(folder))
            for role, folder in zip(get_args(Role), folders, strict=True)
            if folder is not None
        }


def find_models(config: Config) -> ModelFolders:
    """Find and check all models for a run. Raise a UserError if a model is missing, or is incompatible with the config
    or the actor."""
    actor = resolve(config.model.path, revision=config.model.revision)
    hf_config = read_config(actor)
    _check_actor(config, hf_config)
    if config.samples_images:
        check_images(config, DenoiserShape.of(hf_config), pixels_per_latent(actor))
    folders = ModelFolders(
        actor=actor,
        critic=_critic(config, actor, hf_config),
        reward_model=_reward_model(config, actor, hf_config),
        implicit_reward=_implicit_reward(config, actor, hf_config),
        draft=_draft(config, actor, hf_config),
        teachers=_teachers(config, actor, hf_config),
    )
    _announce_untrained_parts(config, folders)
    if not config.samples_images and linear_attention(completed(hf_config)) is not None:
        print(
            "model: gated delta nets carry a state along each sample, so samples do not share their prompt in "
            f"training: each prompt is processed up to {config.trained_per_prompt} times per pass",
            flush=True,
        )
    return folders


def check_local_models(config: Config) -> tuple[list[str], dict[Role, dict[str, Any]]]:
    """Check each config.json as in `find_models`, but without downloading or converting models. Raise a UserError under
    the same conditions as `find_models`.

    Returns:
        One message per model with the result, or with the reason why it was not checked; and the configs of the trained
        models that are available on this machine, including their heads.
    """
    lines: list[str] = []
    configs: dict[str, dict[str, Any]] = {}

    def check_path(
        key: str, path: str, check: Callable[[dict[str, Any]], None], revision: str | None = None
    ) -> dict[str, Any] | None:
        try:
            hf_config = read_local_config(path, key=key, revision=revision)
        except ModelNotLocal as reason:
            lines.append(f"{key}={path}: not checked, because {reason}")
            return None
        check(hf_config)
        lines.append(f"{key}={path}: config.json is compatible with the recipe")
        return hf_config

    actor = check_path("model.path", config.model.path, partial(_check_actor, config), config.model.revision)
    if actor is None:
        return lines, {}  # all other models are checked against the actor
    configs["actor"] = actor
    for is_used, placed, check in (
        (config.has_critic, config.critic, check_critic_model),
        (config.has_reward_model, config.reward_model, check_reward_model),
        (config.has_implicit_reward, config.implicit_reward, check_implicit_reward_model),
    ):
        if is_used and placed.path is None:
            check(config, actor, actor)
            configs[placed.section] = actor
        elif is_used and placed.path is not None:
            model = check_path(f"{placed.section}.path", placed.path, partial(check, config, actor))
            if model is not None:
                configs[placed.section] = model
    for teacher, teacher_path in config.placed_teachers:
        check = partial(check_teacher_model, config, teacher, actor)
        check_path(teacher.path_key, teacher_path, check, teacher.revision)
    if (path := config.rollout.speculative.path) is not None:
        check_path(DRAFT_KEY, path, partial(check_draft_model, config, actor))
    return lines, {role: trained_hf_config(config, role, configs[role]) for role in get_args(Role) if role in configs}


def _check_actor(config: Config, hf_config: dict[str, Any]) -> None:
    check_model(config, hf_config)
    if config.actor.adapters is not None and config.actor.lora.path is not None:
        check_adapter_config(Path(config.actor.lora.path).expanduser(), config.actor.lora)


def _announce_untrained_parts(config: Config, folders: ModelFolders) -> None:
    if part := untrained_part(policy_hf_config(config, folders.hf_config)):
        print(f"model: {part} is neither trained nor exported", flush=True)
    for key, folder in folders.others.items():
        if part := untrained_part(read_config(folder)):
            print(f"{key.removesuffix('path').rstrip(': .')}: {part} is not used", flush=True)


def _critic(config: Config, actor: Path, hf_config: Mapping[str, Any]) -> Path | None:
    if not config.has_critic:
        return None
    folder = actor if config.critic.path is None else resolve(config.critic.path, key="critic.path")
    check_critic_model(config, hf_config, read_config(folder))
    return folder


def _reward_model(config: Config, actor: Path, hf_config: Mapping[str, Any]) -> Path | None:
    path = config.reward_model.path
    if path is None:
        return None
    folder = resolve(path, key="reward_model.path")
    check_reward_model(config, hf_config, read_config(folder))
    if config.reward_model.input_format == "ids":
        fix = "set reward_model.input_format=text or chat, or use a model with the actor's tokenizer"
        _check_tokenizer(config, "reward_model.path", path, folder, actor, fix)
    else:
        _check_input_format(config, folder)
    return folder


def _check_input_format(config: Config, folder: Path) -> None:
    """Raise a UserError if the reward model's tokenizer does not support reward_model.input_format."""
    tokenizer, input_format = load_tokenizer(folder, "reward_model.path"), config.reward_model.input_format
    if input_format != "question" and not tokenizer.is_fast:
        raise UserError(
            f"reward_model.input_format={input_format}: the tokenizer of {folder} cannot map tokens to text. Fix: use "
            "a model with a tokenizer.json"
        )
    if input_format != "text" and tokenizer.chat_template is None:
        fix = "set reward_model.input_format=text" if input_format == "chat" else "use an instruction-tuned model"
        raise UserError(
            f"reward_model.input_format={input_format}: the tokenizer of {folder} has no chat template. Fix: {fix}"
        )


def _implicit_reward(config: Config, actor: Path, hf_config: Mapping[str, Any]) -> Path | None:
    path = config.implicit_reward.path
    if not config.has_implicit_reward:
        return None
    folder = actor if path is None else resolve(path, key="implicit_reward.path")
    check_implicit_reward_model(config, hf_config, read_config(folder))
    if path is not None:
        fix = "use a model with the actor's tokenizer"
        _check_tokenizer(config, "implicit_reward.path", path, folder, actor, fix)
    return folder


def _teachers(config: Config, actor: Path, hf_config: Mapping[str, Any]) -> dict[str, Path]:
    folders = {}
    for teacher, path in config.placed_teachers:
        folder = resolve(path, key=teacher.path_key, revision=teacher.revision)
        check_teacher_model(config, teacher, hf_config, read_config(folder))
        fix = (
            "use a teacher with the actor's tokenizer, because megarl does not align log-probs between different "
            "tokenizations of a text"
        )
        _check_tokenizer(config, teacher.path_key, path, folder, actor, fix)
        _check_vocabulary(teacher.path_key, path, folder, actor)
        folders[teacher.name] = folder
    return folders


def _check_vocabulary(key: str, path: str, folder: Path, actor: Path) -> None:
    """Raise a UserError if the model's embedding has fewer rows than the actor's and lacks a token of the tokenizer."""
    size, actors_size = map(vocab_size, (folder, actor))
    largest = max(load_tokenizer(actor).get_vocab().values())
    if largest >= size < actors_size:
        raise UserError(
            f"{key}={path}: its vocab_size={size} is smaller than the actor's vocab_size={actors_size}, and the "
            f"tokenizer has token ids up to {largest}. Fix: use a model with an embedding for each token"
        )


def _draft(config: Config, actor: Path, hf_config: Mapping[str, Any]) -> Path | None:
    path = config.rollout.speculative.path
    if path is None:
        return None
    folder = resolve(path, key=DRAFT_KEY)
    check_draft_model(config, hf_config, read_config(folder))
    if not config.rollout.drafts_with_eagle:  # an EAGLE-3 draft has no tokenizer of its own
        _check_tokenizer(config, DRAFT_KEY, path, folder, actor, "use a smaller model of the actor's family")
    return folder


def _check_tokenizer(config: Config, key: str, path: str, folder: Path, actor: Path, fix: str) -> None:
    """Raise a UserError that names the first difference if the tokenizer does not map the same tokens, including
    special and added tokens, to the same ids as the actor's."""
    own, expected = load_tokenizer(folder, key).get_vocab(), load_tokenizer(actor).get_vocab()
    differing = sorted({number for _, number in own.items() ^ expected.items()})
    if not differing:
        return
    names = [{number: repr(token) for token, number in vocab.items()} for vocab in (own, expected)]
    token, actors_token = (tokens.get(differing[0], "no token") for tokens in names)
    raise UserError(
        f"{key}={path}: its tokenizer differs from the tokenizer of model.path={config.model.path}, so it would read "
        f"the sampled token ids as different text. {len(differing)} of {len(expected)} ids differ: id {differing[0]} "
        f"is {token} instead of {actors_token}. Fix: {fix}"
    )
