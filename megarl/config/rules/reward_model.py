"""Rules for section `reward_model`."""

from __future__ import annotations

from collections.abc import Callable

from megarl.config.document import show
from megarl.config.schema import Config


def reward_engines_have_tensor_and_data_parallel_ranks_only(config: Config) -> str | None:
    layout = config.reward_model.layout
    other = {key: value for key, value in layout.model_dump().items() if key not in ("tp", "dp") and value}
    assignments = [f"{key}={str(value).lower()}" for key, value in other.items() if value is True or value != 1]
    if not config.has_reward_model or config.reward_model.engine == "megatron" or not assignments:
        return None
    return (
        f"reward_model.engine=vllm: its layout is dp engines of tp ranks, and reward_model.layout has "
        f"{', '.join(assignments)}. Fix: take the default there, or set reward_model.engine=megatron"
    )


def judge_is_in_vllm(config: Config) -> str | None:
    if not config.reward_model.judges or config.reward_model.engine == "vllm":
        return None
    return (
        "reward_model.input_format=question: a judge generates text, which reward_model.engine="
        f"{config.reward_model.engine} cannot. Fix: set reward_model.engine=vllm"
    )


def judge_reads_the_response(config: Config) -> str | None:
    template = config.reward_model.judge.template
    if not config.reward_model.judges or template is None or "{response}" in template:
        return None
    return (
        f"reward_model.judge.template={show(template)}: it has no {{response}}, so all responses would get the same "
        "rating. Fix: add {response} where the judge should read it"
    )


def judge_has_a_scale(config: Config) -> str | None:
    lowest, highest = config.reward_model.judge.scale
    if not config.reward_model.judges or lowest < highest:
        return None
    return (
        f"reward_model.judge.scale={show([lowest, highest])}: the lowest rating is not below the highest. Fix: set "
        "them in this order, such as [1, 10]"
    )


def judge_has_room_for_a_question(config: Config) -> str | None:
    settings = config.reward_model
    key, context = config.context_of(settings)
    answer = settings.judge.max_new_tokens
    if not settings.judges or answer < context:
        return None
    return (
        f"reward_model.judge.max_new_tokens={answer}: {key}={context} is the limit of question and answer together. "
        "Fix: lower it, or raise reward_model.context_length"
    )


RULES: tuple[Callable[[Config], str | None], ...] = (
    reward_engines_have_tensor_and_data_parallel_ranks_only,
    judge_is_in_vllm,
    judge_reads_the_response,
    judge_has_a_scale,
    judge_has_room_for_a_question,
)
