"""Rules for section `evaluation`."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from math import gcd

from megarl.algorithms import evaluation as estimates
from megarl.config.data_schema import OWN_TASKS
from megarl.config.evaluation import config_of_set
from megarl.config.evaluation_schema import EvaluationSet
from megarl.config.schema import Config

COUNTED = ("failed_frac", "truncated_frac", "length_mean")
"""Metrics of an evaluation set in addition to its estimates."""

OF_TURNS = ("turns_mean",)
"""Additional metrics of evaluation sets that use an environment."""


def evaluation_requires_engines(config: Config) -> Iterator[str]:
    if config.evaluation.sets and config.is_offline:
        yield (
            f"evaluation.sets: with data.format={config.data.format} the run has no engines to sample from. Fix: set "
            "evaluation.sets=[] and evaluate the trained model with `megarl evaluate MODEL RECIPE`"
        )


def generated_tasks_of_sets_require_environment(item: EvaluationSet, of_set: Config) -> Iterator[str]:
    if of_set.data.source == OWN_TASKS and not of_set.has_environment:
        yield (
            f"evaluation.sets: {item.name} has source={OWN_TASKS} but no environment to generate the tasks. Fix: set "
            f"the environment of {item.name}, or set its source to a file"
        )


def system_prompts_of_sets_require_chat_template(item: EvaluationSet, of_set: Config) -> Iterator[str]:
    """A set's own system prompt follows the rules for data.system_prompt. An inherited system prompt is dropped if it
    cannot be used."""
    data = of_set.data
    if item.system_prompt and data.source == OWN_TASKS:
        yield (
            f"evaluation.sets: {item.name} has a system_prompt, but with source={OWN_TASKS} the environment writes the "
            "prompts. Fix: remove system_prompt, and write system messages in the environment"
        )
    elif item.system_prompt and not data.chat_template:
        yield (
            f"evaluation.sets: {item.name} has a system_prompt, but chat_template=false cannot format it. Fix: set "
            "chat_template: true, or put the text into the prompts"
        )


def environment_options_of_sets_require_class(item: EvaluationSet, of_set: Config) -> Iterator[str]:
    environment = item.environment
    if environment is not None and environment.name is None and environment.options:
        yield (
            f"evaluation.sets: {item.name} has environment.options={environment.options}, but no environment.class to "
            "pass them to. Fix: set environment.class, or remove environment.options"
        )


def multi_turn_sets_have_rollout_rewards(item: EvaluationSet, of_set: Config) -> Iterator[str]:
    """Functions with per_turn score one response, not rollouts with several turns or samples."""
    per_turn = [entry.function for entry in of_set.rewards.functions if entry.per_turn]
    if per_turn and of_set.has_environment:
        yield (
            f"evaluation.sets: {item.name} has {per_turn[0]} with per_turn=true, which scores a single response, but "
            f"with environment.class={of_set.environment.name} a rollout has several turns. Fix: remove the function, "
            "and return rewards from the environment's steps"
        )


def images_of_sets_are_read(item: EvaluationSet, of_set: Config) -> Iterator[str]:
    if item.image_column and not of_set.model.vision:
        yield (
            f"evaluation.sets: {item.name} has image_column={item.image_column}, but model.vision=false. Fix: set "
            "model.vision=true, or remove image_column"
        )
    elif item.image_column and of_set.data.is_procedural:
        yield (
            f"evaluation.sets: {item.name} has image_column={item.image_column}, but source={of_set.data.source} has "
            "no images. Fix: set source to a file, or remove image_column"
        )
    elif of_set.data.image_column is not None and of_set.has_environment and not of_set.data.chat_template:
        yield (
            f"evaluation.sets: {item.name}: with environment.class={of_set.environment.name}, images require a chat "
            "template. Fix: set data.chat_template=true, image_column: '' or environment: {class: null}"
        )


def set_names_are_unique(config: Config) -> Iterator[str]:
    names = [item.name for item in config.evaluation.sets]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        yield f"evaluation.sets: two sets have the name {twice}. Fix: rename one of them"


def sets_have_evaluation_times(config: Config) -> Iterator[str]:
    """Each set must be evaluated at least once: it needs its own every_steps, or evaluation.every_steps, at_start or
    at_end."""
    settings = config.evaluation
    never = [item.name for item in settings.sets if settings.interval(item) is None]
    if never and not settings.at_start and not settings.at_end:
        yield (
            f"evaluation.sets: {', '.join(never)} would never be evaluated, because at_start=false, at_end=false and "
            "every_steps=null. Fix: set evaluation.every_steps=10"
        )


def several_samples_require_temperature(item: EvaluationSet, of_set: Config) -> Iterator[str]:
    is_answered = of_set.has_environment  # at temperature 0, environments may still make samples differ
    if item.samples_per_prompt > 1 and item.temperature == 0 and not is_answered:
        yield (
            f"evaluation.sets: {item.name} has samples_per_prompt={item.samples_per_prompt} and temperature=0, so all "
            "samples of a prompt would be identical. Fix: set temperature: 1.0, or samples_per_prompt: 1"
        )


def sets_have_reward_functions(item: EvaluationSet, of_set: Config) -> Iterator[str]:
    if not of_set.rewards.functions and not of_set.has_environment:
        yield (
            f"evaluation.sets: {item.name} has no reward functions, and rewards.functions=[]. Fix: list a function for "
            "the set, for example functions: [{function: exact_match}]"
        )


def context_holds_a_prompt_and_its_response(item: EvaluationSet, of_set: Config) -> Iterator[str]:
    context, new = of_set.rollout.context_length, of_set.rollout.max_new_tokens
    if item.max_new_tokens is not None and new >= context:
        yield (
            f"evaluation.sets: {item.name} has max_new_tokens={new}, which leaves {context} - {new} = {context - new} "
            f"of rollout.context_length={context} tokens for the prompt. Fix: lower max_new_tokens of the set, or "
            "raise rollout.context_length"
        )


def best_is_a_metric(config: Config) -> Iterator[str]:
    metric = config.evaluation.best.metric
    known = [name for item in config.evaluation.sets for name in metrics_of(config, item)]
    if metric is not None and not known:
        yield (
            f"evaluation.best.metric={metric}: evaluation.sets=[] provides no metrics. Fix: add an evaluation set, or "
            "set evaluation.best.metric=null"
        )
    elif metric is not None and metric not in known:
        [near] = difflib.get_close_matches(metric, known, n=1, cutoff=0.0)
        yield (
            f"evaluation.best.metric={metric}: no evaluation set has this metric. Did you mean {near}? Fix: use one of "
            f"{', '.join(known)}"
        )


def best_evaluation_has_checkpoint(config: Config) -> Iterator[str]:
    """Every evaluation that may be the best must be at a step with a checkpoint. The last step always has one."""
    settings, every = config.evaluation, config.checkpoint.every_steps
    metric = settings.best.metric
    judged = next((item for item in settings.sets if metric in metrics_of(config, item)), None)
    if judged is None:
        return
    interval = settings.interval(judged)
    if every is None:
        yield (
            f"evaluation.best.metric={metric}: checkpoint.every_steps=null saves no checkpoint to select from. Fix: "
            f"set checkpoint.every_steps={interval or 50}"
        )
    elif interval is not None and interval % every:
        yield (
            f"evaluation.best.metric={metric}: {judged.name} is evaluated every {interval} steps, but checkpoints are "
            f"saved every {every} steps, so some evaluations would have no checkpoint. Fix: set "
            f"checkpoint.every_steps={gcd(interval, every)}"
        )


def metrics_of(config: Config, item: EvaluationSet) -> list[str]:
    """Return the metrics of a set that evaluation.best.metric may name."""
    counted = (*COUNTED, *OF_TURNS) if config_of_set(config, item).has_environment else COUNTED
    return [item.prefix + name for name in (*estimates.names(item.samples_per_prompt), *counted)]


RULES = (
    evaluation_requires_engines,
    set_names_are_unique,
    sets_have_evaluation_times,
    best_is_a_metric,
    best_evaluation_has_checkpoint,
)

SET_RULES = (
    generated_tasks_of_sets_require_environment,
    system_prompts_of_sets_require_chat_template,
    environment_options_of_sets_require_class,
    multi_turn_sets_have_rollout_rewards,
    several_samples_require_temperature,
    sets_have_reward_functions,
    context_holds_a_prompt_and_its_response,
    images_of_sets_are_read,
)
"""Rules for one set. They also receive the set's configuration."""
