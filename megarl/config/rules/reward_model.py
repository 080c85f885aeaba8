"""Rules for section `reward_model`."""

from __future__ import annotations

from collections.abc import Callable

from megarl.config.document import show
from megarl.config.schema import Config


def reward_engines_use_only_tp_and_dp(config: Config) -> str | None:
    layout = config.reward_model.layout
    other = {key: value for key, value in layout.model_dump().items() if key not in ("tp", "dp") and value}
    assignments = [f"{key}={str(value).lower()}" for key, value in other.items() if value is True or value != 1]
    if not config.has_reward_model or config.reward_model.engine == "megatron" or not assignments:
        return None
    return (
        "reward_model.engine=vllm: reward engines support only tp and dp, but reward_model.layout has "
        f"{', '.join(assignments)}. Fix: remove these keys, or set reward_model.engine=megatron"
    )


def judge_requires_vllm(config: Config) -> str | None:
    if not config.reward_model.judges or config.reward_model.engine == "vllm":
        return None
    return (
        "reward_model.input_format=question: a judge generates text, but "
        f"reward_model.engine={config.reward_model.engine} only computes scores. Fix: set reward_model.engine=vllm"
    )


def judge_template_contains_response(config: Config) -> str | None:
    template = config.reward_model.judge.template
    if not config.reward_model.judges or template is None or "{response}" in template:
        return None
    return (
        f"reward_model.judge.template={show(template)}: the template has no {{response}}, so all responses would get "
        "the same rating. Fix: add {response} where the judge should read the response"
    )


def judge_scale_is_ordered(config: Config) -> str | None:
    lowest, highest = config.reward_model.judge.scale
    if not config.reward_model.judges or lowest < highest:
        return None
    return (
        f"reward_model.judge.scale={show([lowest, highest])}: the lowest rating must be below the highest. Fix: list "
        "the lower rating first, for example [1, 10]"
    )


def judge_context_holds_a_question(config: Config) -> str | None:
    settings = config.reward_model
    key, context = config.context_of(settings)
    answer = settings.judge.max_new_tokens
    if not settings.judges or answer < context:
        return None
    return (
        f"reward_model.judge.max_new_tokens={answer}: no tokens are left for the question, because {key}={context} "
        f"limits the question and the answer together. Fix: set reward_model.judge.max_new_tokens below {context}, or "
        f"raise {key}"
    )


RULES: tuple[Callable[[Config], str | None], ...] = (
    reward_engines_use_only_tp_and_dp,
    judge_requires_vllm,
    judge_template_contains_response,
    judge_scale_is_ordered,
    judge_context_holds_a_question,
)
