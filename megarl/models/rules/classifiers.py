"""Rules for models with a score head, and for their vocabulary."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from megarl.config.model_schema import Placed
from megarl.config.schema import Config
from megarl.models.classifier import Kind
from megarl.models.rules.model_path import path_of


def has_one_label(config: Config, placed: Placed, num_labels: int) -> Iterator[str]:
    if num_labels != 1:
        yield (
            f"{path_of(config, placed)}: the model has {num_labels} labels (id2label), but a score is a single number. "
            "Fix: use a classification checkpoint with num_labels=1"
        )


def vocabulary_covers_actors(
    config: Config, placed: Placed, actor: Mapping[str, Any], model: Mapping[str, Any]
) -> Iterator[str]:
    """Require that the vocabulary of a model that processes the actor's token ids is not smaller than the actor's."""
    if model["vocab_size"] < actor["vocab_size"]:
        yield (
            f"{path_of(config, placed)}: its vocab_size={model['vocab_size']} is smaller than the actor's "
            f"vocab_size={actor['vocab_size']}, but it reads the actor's token ids. Fix: use a model with the actor's "
            "tokenizer"
        )


def classifier_kind_fits_objective(config: Config, kind: Kind) -> Iterator[str]:
    objective = config.algorithm.objective
    names = {"sequence": "...ForSequenceClassification", "token": "...ForTokenClassification"}
    expected = objective.spec.classifier
    if expected not in (None, kind):
        yield (
            f"{path_of(config, config.actor)}: its architecture is {names[kind]}, but "
            f"algorithm.objective.name={objective.name} trains {names[expected]}. Fix: use a {names[expected]} model, "
            "or a language model; megarl adds a new head to it"
        )


def step_end_requires_token_classifier(config: Config, kind: str) -> Iterator[str]:
    if config.reward_model.step_end is not None and kind != "token":
        yield (
            f"reward_model.step_end={config.reward_model.step_end!r}: {path_of(config, config.reward_model)} scores "
            "whole samples (...ForSequenceClassification). Fix: set reward_model.step_end=null"
        )


def token_scores_require_sampled_tokens(config: Config, kind: str) -> Iterator[str]:
    """Require sampled tokens for token-level scores, because only sampled tokens are actions."""
    settings = config.reward_model
    per_token = settings.aggregation is None and config.algorithm.advantage.spec.comparison == "values"
    if settings.input_format != "ids" and kind != "sequence" and per_token and settings.step_end is None:
        yield (
            f"reward_model.input_format={settings.input_format}: {path_of(config, settings)} scores the tokens of its "
            f"own tokenizer, but {config.algorithm.advantage.estimator} needs scores of the sampled tokens. Fix: set "
            "reward_model.step_end, reward_model.aggregation=mean or reward_model.input_format=ids"
        )
