"""Rules for section `actor.lora`."""

from __future__ import annotations

from collections.abc import Callable

from megarl.config.schema import Config


def adapters_are_beside_frozen_weights(config: Config) -> str | None:
    if config.actor.adapters is None or not config.actor.frozen:
        return None
    return (
        f"actor.frozen={config.actor.frozen}: with actor.lora.rank={config.actor.lora.rank} the whole model is frozen "
        "and only its adapters are trained. Fix: set actor.frozen=[] or actor.lora.rank=null"
    )


def patterns_name_no_adapters(config: Config) -> str | None:
    patterns = config.actor.optimizer.no_weight_decay
    if config.actor.adapters is None or not patterns:
        return None
    return (
        f"actor.optimizer.no_weight_decay={patterns}: it names tensors of the model, which are frozen with "
        f"actor.lora.rank={config.actor.lora.rank}. Fix: set it to []"
    )


def heads_are_trained_with_the_model(config: Config) -> str | None:
    """A new score or value head has no adapter, so it would not be trained."""
    if config.actor.adapters is None:
        return None
    rank = config.actor.lora.rank
    if config.trains_reward_model:
        return (
            f"actor.lora.rank={rank}: with algorithm.objective.name={config.algorithm.objective.name} the actor has a "
            "new score head, which would not be trained. Fix: set actor.lora.rank=null"
        )
    if config.actor_has_values:
        return (
            f"actor.lora.rank={rank}: with critic.shared_backbone=true the actor has a new value head, which would "
            "not be trained. Fix: set critic.shared_backbone=false or actor.lora.rank=null"
        )
    return None


def products_are_not_in_fp8(config: Config) -> str | None:
    if config.actor.adapters is None or config.actor.fp8 is None:
        return None
    return (
        f"actor.fp8={config.actor.fp8}: with actor.lora.rank={config.actor.lora.rank} engines compute with merged "
        "weights, which separate fp8 products do not match. Fix: set actor.fp8=null or actor.lora.rank=null"
    )


def reference_is_the_model(config: Config) -> str | None:
    renew = config.algorithm.kl.renew_steps
    if config.actor.adapters is None or renew is None:
        return None
    return (
        f"algorithm.kl.renew_steps={renew}: with actor.lora.rank={config.actor.lora.rank} the reference is the model "
        "without adapters, which never changes. Fix: set renew_steps=null or actor.lora.rank=null"
    )


def merged_weights_stay(config: Config) -> str | None:
    if config.actor.adapters is None or "parameters" not in config.actor.offload:
        return None
    return (
        f"actor.offload={config.actor.offload}: with actor.lora.rank={config.actor.lora.rank} the merged weights for "
        "the engines are a copy that is not offloaded. Fix: remove parameters from the list"
    )


def nothing_else_of_the_model_moves(config: Config) -> str | None:
    """Checkpoints contain only the adapters, so no other weights may change."""
    rate = config.actor.megatron_overrides.model.get("moe_router_bias_update_rate", 0)
    if config.actor.adapters is None or not rate:
        return None
    return (
        f"actor.megatron_overrides.model.moe_router_bias_update_rate={rate}: with actor.lora.rank="
        f"{config.actor.lora.rank} checkpoints contain only adapters, not router biases. Fix: set it to 0"
    )


def shared_experts_exchange_inside_their_layers(config: Config) -> str | None:
    overlaps = config.actor.megatron_overrides.model.get("moe_shared_expert_overlap", False)
    if config.actor.adapters is None or not overlaps:
        return None
    return (
        "actor.megatron_overrides.model.moe_shared_expert_overlap=true: with actor.lora.rank="
        f"{config.actor.lora.rank} adapters communicate inside their layers, and the overlap outside of them. Fix: "
        "set it to false"
    )


RULES: tuple[Callable[[Config], str | None], ...] = (
    adapters_are_beside_frozen_weights,
    patterns_name_no_adapters,
    heads_are_trained_with_the_model,
    products_are_not_in_fp8,
    reference_is_the_model,
    merged_weights_stay,
    nothing_else_of_the_model_moves,
    shared_experts_exchange_inside_their_layers,
)
