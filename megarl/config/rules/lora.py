"""The rules of section `actor.lora`."""

from __future__ import annotations

from collections.abc import Callable

from megarl.config.schema import Config


def adapters_are_beside_frozen_weights(config: Config) -> str | None:
    if config.actor.adapters is None or not config.actor.frozen:
        return None
    return (
        f"actor.frozen={config.actor.frozen}: with actor.lora.rank={config.actor.lora.rank} the whole model is frozen, "
        "and its adapters are trained; set actor.frozen=[] or actor.lora.rank=null"
    )


def patterns_name_no_adapters(config: Config) -> str | None:
    patterns = config.actor.optimizer.no_weight_decay
    if config.actor.adapters is None or not patterns:
        return None
    return (
        f"actor.optimizer.no_weight_decay={patterns}: it names tensors of the model, which are frozen with "
        f"actor.lora.rank={config.actor.lora.rank}; set it to []"
    )


def heads_are_trained_with_the_model(config: Config) -> str | None:
    """A new head, of scores or values, is no linear layer of the decoder, and would stay as it is beside adapters."""
    if config.actor.adapters is None:
        return None
    rank = config.actor.lora.rank
    if config.trains_reward_model:
        return (
            f"actor.lora.rank={rank}: with algorithm.objective.name=reward_model the actor has a new score head, which "
            "would not be trained; set actor.lora.rank=null"
        )
    if config.actor_has_values:
        return (
            f"actor.lora.rank={rank}: with critic.trunk=actor the actor has a new value head, which would not be "
            "trained; set critic.trunk=own or actor.lora.rank=null"
        )
    return None


def products_are_not_in_fp8(config: Config) -> str | None:
    if config.actor.adapters is None or config.actor.fp8 is None:
        return None
    return (
        f"actor.fp8={config.actor.fp8}: with actor.lora.rank={config.actor.lora.rank} engines get the sum of each "
        "weight and its adapter, which products in fp8 would not be of; set actor.fp8=null or actor.lora.rank=null"
    )


def reference_is_the_model(config: Config) -> str | None:
    renew = config.algorithm.kl.renew_steps
    if config.actor.adapters is None or renew is None:
        return None
    return (
        f"algorithm.kl.renew_steps={renew}: with actor.lora.rank={config.actor.lora.rank} the reference is the model "
        "without its adapters, which never changes; set renew_steps=null or actor.lora.rank=null"
    )


RULES: tuple[Callable[[Config], str | None], ...] = (
    adapters_are_beside_frozen_weights,
    patterns_name_no_adapters,
    heads_are_trained_with_the_model,
    products_are_not_in_fp8,
    reference_is_the_model,
)
