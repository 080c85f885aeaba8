"""Rules for the sections `rewards` and `reward_model`."""

from __future__ import annotations

import re
from collections.abc import Iterator

from megarl.config.document import show
from megarl.config.schema import Config
from megarl.core.user_file import is_in_file

RESERVED = re.compile(
    r"judge|reward_model|environment|mean|std|baseline|failed_frac|infrastructure_failed_frac|zero_std_groups"
    r"|greedy_mean|environment_.*|.*_(unrated|truncated|verbatim)_frac"
)
"""Names reserved for other reward components and for summary metrics of the reward."""


def reward_engines_use_only_tp_and_dp(config: Config) -> Iterator[str]:
    layout = config.reward_model.layout
    other = {key: value for key, value in layout.model_dump().items() if key not in ("tp", "dp") and value}
    assignments = [f"{key}={str(value).lower()}" for key, value in other.items() if value is True or value != 1]
    if config.has_reward_model and config.reward_model.engine != "megatron" and assignments:
        yield (
            "reward_model.engine=vllm: reward engines support only tp and dp, but reward_model.layout has "
            f"{', '.join(assignments)}. Fix: remove these keys, or set reward_model.engine=megatron"
        )


def judge_requires_vllm(config: Config) -> Iterator[str]:
    if config.reward_model.judges and config.reward_model.engine != "vllm":
        yield (
            "reward_model.input_format=question: a judge must generate text, but "
            f"reward_model.engine={config.reward_model.engine} only computes scores. Fix: set reward_model.engine=vllm"
        )


def judge_template_contains_response(config: Config) -> Iterator[str]:
    template = config.reward_model.judge.template
    if config.reward_model.judges and template is not None and "{response}" not in template:
        yield (
            f"reward_model.judge.template={show(template)}: the template has no {{response}}, so all responses would "
            "get the same rating. Fix: add {response} where the judge should read the response"
        )


def judge_scale_is_ordered(config: Config) -> Iterator[str]:
    lowest, highest = config.reward_model.judge.scale
    if config.reward_model.judges and lowest >= highest:
        yield (
            f"reward_model.judge.scale={show([lowest, highest])}: the lowest rating must be below the highest. Fix: "
            "list the lower rating first, for example [1, 10]"
        )


def judge_context_holds_a_question(config: Config) -> Iterator[str]:
    settings = config.reward_model
    key, context = config.context_of(settings)
    answer = settings.judge.max_new_tokens
    if settings.judges and answer >= context:
        yield (
            f"reward_model.judge.max_new_tokens={answer}: no tokens are left for the question, because {key}={context} "
            f"limits the question and the answer together. Fix: set reward_model.judge.max_new_tokens below {context}, "
            f"or raise {key}"
        )


def samples_have_rewards(config: Config) -> Iterator[str]:
    if not config.is_offline and not config.has_rewards and not config.has_teachers:
        yield (
            "rewards.functions=[]: samples would have no reward. Fix: add a function such as exact_match, or set "
            "reward_model.path or rewards.judge"
        )


def turn_rewards_require_user_functions(config: Config) -> Iterator[str]:
    functions = [item.function for item in config.rewards.functions if item.per_turn and not is_in_file(item.function)]
    if functions:
        yield (
            f"rewards.functions: {functions[0]} with per_turn=true: the function returns one reward for the whole "
            "response. Fix: set per_turn=false, or use path/to/file.py:function, a function that returns one reward "
            "per turn"
        )


def reward_sources_require_source_column(config: Config) -> Iterator[str]:
    entries = [entry for entry in config.rewards.functions if entry.sources is not None]
    if entries and not config.is_offline and config.data.source_column is None:
        yield (
            f"rewards.functions: {entries[0].label} with sources={entries[0].sources}: the source of a row is unknown, "
            "because data.source_column=null. Fix: set data.source_column to the column with each row's source"
        )


def labels_are_not_reserved(config: Config) -> Iterator[str]:
    entries = [entry for entry in config.rewards.functions if RESERVED.fullmatch(entry.label)]
    if entries:
        yield (
            f"rewards.functions: {entries[0].function}: the name {entries[0].label} is reserved for one of "
            "megarl's metrics. Fix: add `name: OTHER` to the entry, or change its name"
        )


def judge_requires_several_samples(config: Config) -> Iterator[str]:
    samples, judge = config.batch.samples_per_prompt, config.rewards.judge
    if judge is not None and not config.is_offline and samples <= 1:
        yield (
            f"rewards.judge={judge}: the judge compares the samples of a prompt, but batch.samples_per_prompt=1. Fix: "
            "set batch.samples_per_prompt to at least 2"
        )


def overlong_buffer_fits_a_response(config: Config) -> Iterator[str]:
    buffer, longest = config.rewards.overlong_buffer, config.rollout.max_new_tokens
    if buffer is not None and buffer > longest:
        yield (
            f"rewards.overlong_buffer={buffer}: it exceeds rollout.max_new_tokens={longest}. Fix: set "
            f"rewards.overlong_buffer to at most {longest}"
        )


RULES = (
    reward_engines_use_only_tp_and_dp,
    judge_requires_vllm,
    judge_template_contains_response,
    judge_scale_is_ordered,
    judge_context_holds_a_question,
    samples_have_rewards,
    turn_rewards_require_user_functions,
    reward_sources_require_source_column,
    labels_are_not_reserved,
    judge_requires_several_samples,
    overlong_buffer_fits_a_response,
)
