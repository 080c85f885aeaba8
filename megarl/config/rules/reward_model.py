"""The rules of section `reward_model`."""

from __future__ import annotations

from collections.abc import Callable

from megarl.config.schema import Config


def sampled_ids_have_one_length(config: Config) -> str | None:
    settings = config.reward_model
    if settings.context_length is None or settings.reads != "ids":
        return None
    return (
        f"reward_model.context_length={settings.context_length}: with reward_model.reads=ids it reads the sampled "
        f"tokens, at most rollout.context_length={config.rollout.context_length}; set reward_model.context_length=null"
    )


def reward_engines_have_tensor_and_data_parallel_ranks_only(config: Config) -> str | None:
    layout = config.reward_model.layout
    other = {key: value for key, value in layout.model_dump().items() if key not in ("tp", "dp") and value}
    assignments = [f"{key}={str(value).lower()}" for key, value in other.items() if value is True or value != 1]
    if not config.has_reward_model or config.reward_model.engine == "megatron" or not assignments:
        return None
    return (
        f"reward_model.engine=vllm: its layout is dp engines of tp ranks, and reward_model.layout has "
        f"{', '.join(assignments)}; take the default there, or set reward_model.engine=megatron"
    )


def reward_engines_keep_their_parameters(config: Config) -> str | None:
    settings = config.reward_model
    if not config.has_reward_model or settings.engine == "megatron" or not settings.offload:
        return None
    return (
        f"reward_model.offload={settings.offload}: only a reward model in Megatron moves them, and "
        "reward_model.engine=vllm; set reward_model.offload=[] or reward_model.engine=megatron"
    )


RULES: tuple[Callable[[Config], str | None], ...] = (
    sampled_ids_have_one_length,
    reward_engines_have_tensor_and_data_parallel_ranks_only,
    reward_engines_keep_their_parameters,
)
