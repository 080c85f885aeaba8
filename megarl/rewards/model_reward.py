"""Create the objects that prepare a run's samples for its reward model and convert the model's output to rewards."""

from __future__ import annotations

from pathlib import Path

from megarl.config.schema import Config
from megarl.models.classifier import Kind, score_head_of
from megarl.models.folder import read_config
from megarl.models.tokenizer import load_tokenizer
from megarl.rewards.classifier import ClassifierReward
from megarl.rewards.model_judge import ModelJudge
from megarl.rewards.reading import Reader


def classifier_reward(config: Config, folder: Path, reader: Reader | None = None) -> ClassifierReward:
    """Return the object that converts the scores of the classifier in this folder to rewards."""
    rewards_tokens = config.algorithm.advantage.credits_to_go
    return ClassifierReward(_kind(folder), config.reward_model, load_tokenizer(folder), reader, rewards_tokens)


def model_reader(config: Config, folder: Path, actor_folder: Path) -> Reader | None:
    """Return the reader that retokenizes samples for the reward model, or None if it reads the sampled token ids."""
    settings = config.reward_model
    if settings.input_format == "ids":
        return None
    _, longest = config.context_of(settings)
    tokenizer = load_tokenizer(folder, date=config.data.date)
    return Reader(_kind(folder), settings, longest, tokenizer, load_tokenizer(actor_folder))


def model_judge(config: Config, folder: Path, actor_folder: Path) -> ModelJudge:
    """Return the judge that phrases questions for the language model in this folder and parses its ratings."""
    settings = config.reward_model
    _, longest = config.context_of(settings)
    return ModelJudge(settings, longest, load_tokenizer(folder, date=config.data.date), load_tokenizer(actor_folder))


def _kind(folder: Path) -> Kind:
    head = score_head_of(read_config(folder))
    assert head is not None, "preflight rejects models without a score head"
    return head.kind
