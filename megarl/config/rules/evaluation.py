"""The rules of section `evaluation`."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from math import gcd

from megarl.algorithms import evaluation as estimates
from megarl.config.evaluation import longest_response
from megarl.config.evaluation_schema import EvaluationSet
from megarl.config.schema import Config

COUNTED = ("failed_share", "truncated_share", "length_mean")
"""Metrics of a set beside its estimates."""


def something_samples(config: Config) -> str | None:
    if not config.evaluation.sets or not config.is_offline:
        return None
    return (
        f"evaluation.sets: with data.rows={config.data.rows} no engine starts that could sample; remove them, and "
        "evaluate the trained model with `megarl evaluate`"
    )


def responses_are_whole_rollouts(config: Config) -> str | None:
    if not config.evaluation.sets or not config.has_environment:
        return None
    return (
        f"evaluation.sets: their samples are single responses, and with environment.class={config.environment.name} a "
        "rollout has several turns; remove the sets"
    )


def sets_have_names_of_their_own(config: Config) -> str | None:
    names = [item.name for item in config.evaluation.sets]
    twice = next((name for name in names if names.count(name) > 1), None)
    return None if twice is None else f"evaluation.sets: {twice} is the name of two; give each one of its own"


def sets_are_evaluated(config: Config) -> str | None:
    """The key every_steps of a set counts, too."""
    settings = config.evaluation
    never = [item.name for item in settings.sets if settings.interval(item) is None]
    if not never or settings.at_start or settings.at_end:
        return None
    return (
        f"evaluation.sets: {', '.join(never)} would never be evaluated, with at_start and at_end false; set "
        "evaluation.every_steps=10"
    )


def samples_of_a_prompt_differ(config: Config) -> str | None:
    for item in config.evaluation.sets:
        if item.samples_per_prompt > 1 and item.temperature == 0:
            return (
                f"evaluation.sets: {item.name} has samples_per_prompt={item.samples_per_prompt} with temperature=0, so "
                "that all samples of a prompt would be the same; set temperature: 1.0, or samples_per_prompt: 1"
            )
    return None


def sets_are_scored(config: Config) -> str | None:
    for item in config.evaluation.sets:
        if not (config.rewards.functions if item.functions is None else item.functions):
            return (
                f"evaluation.sets: {item.name} has no functions, and rewards.functions has none for it; list one, such "
                "as functions: [{function: exact_match}]"
            )
    return None


def context_holds_a_prompt_and_its_response(config: Config) -> str | None:
    context = config.rollout.context_length
    for item in config.evaluation.sets:
        new = longest_response(config, item)
        if item.max_new_tokens is not None and new >= context:
            return (
                f"evaluation.sets: {item.name} has max_new_tokens={new}, which leaves {context - new} of "
                f"rollout.context_length={context} tokens for the prompt ({context} - {new}); lower it or raise "
                "context_length"
            )
    return None


def best_is_a_metric(config: Config) -> str | None:
    metric = config.evaluation.best.metric
    known = [name for item in config.evaluation.sets for name in metrics_of(item)]
    if metric is None or metric in known:
        return None
    if not known:
        return f"evaluation.best.metric={metric}: there are no evaluation.sets; list some, or set it to null"
    [near] = difflib.get_close_matches(metric, known, n=1, cutoff=0.0)
    return f"evaluation.best.metric={metric}: no set has it; did you mean {near}? All: {', '.join(known)}"


def best_is_saved(config: Config) -> str | None:
    """Every evaluation that may be the best is at a step with a checkpoint; that after the last step is."""
    settings, every = config.evaluation, config.checkpoint.every_steps
    metric = settings.best.metric
    judged = next((item for item in settings.sets if metric in metrics_of(item)), None)
    if judged is None:
        return None
    interval = settings.interval(judged)
    if every is None:
        return (
            f"evaluation.best.metric={metric}: with checkpoint.every_steps=null none is saved; set "
            f"checkpoint.every_steps={interval or 50}"
        )
    if interval is None or interval % every == 0:
        return None
    return (
        f"evaluation.best.metric={metric}: {judged.name} is evaluated every {interval} steps, and checkpoints are "
        f"saved every {every}, so that some evaluations would have none; set checkpoint.every_steps="
        f"{gcd(interval, every)}"
    )


def metrics_of(item: EvaluationSet) -> list[str]:
    """Returns the names in metrics.jsonl of what can be the best of a set."""
    return [item.prefix + name for name in (*estimates.names(item.samples_per_prompt), *COUNTED)]


RULES: tuple[Callable[[Config], str | None], ...] = (
    something_samples,
    responses_are_whole_rollouts,
    sets_have_names_of_their_own,
    sets_are_evaluated,
    samples_of_a_prompt_differ,
    sets_are_scored,
    context_holds_a_prompt_and_its_response,
    best_is_a_metric,
    best_is_saved,
)
