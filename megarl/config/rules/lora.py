"""Rules for section `actor.lora`."""

from __future__ import annotations

from collections.abc import Callable

from megarl.config.schema import Config


def adapters_exclude_frozen_patterns(config: Config) -> str | None:
    if config.actor.adapters is None or not config.actor.frozen:
        return None
    return (
        f"actor.frozen={config.actor.frozen}: actor.lora.rank={config.actor.lora.rank} already freezes the whole model "
        "and trains only its adapters. Fix: set actor.frozen=[] or actor.lora.rank=null"
    )


def adapters_exclude_weight_decay_patterns(config: Config) -> str | None:
    patterns = config.actor.optimizer.no_weight_decay
    if config.actor.adapters is None or not patterns:
        return None
    return (
        f"actor.optimizer.no_weight_decay={patterns}: the patterns select tensors of the model, but "
        f"actor.lora.rank={config.actor.lora.rank} freezes all of them. Fix: set actor.optimizer.no_weight_decay=[]"
    )


def adapters_exclude_new_heads(config: Config) -> str | None:
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


def adapters_exclude_fp8(config: Config) -> str | None:
    if config.actor.adapters is None or config.actor.fp8 is None:
        return None
    return (
        f"actor.fp8={config.actor.fp8}: with actor.lora.rank={config.actor.lora.rank} engines compute with merged "
        "weights, but the trainer would quantize the model and the adapters separately. Fix: set actor.fp8=null or "
        "actor.lora.rank=null"
    )


def adapters_exclude_reference_renewal(config: Config) -> str | None:
    renew = config.algorithm.kl.renew_steps
    if config.actor.adapters is None or renew is None:
        return None
    return (
        f"algorithm.kl.renew_steps={renew}: with actor.lora.rank={config.actor.lora.rank} the reference is the model "
        "without adapters, which never changes. Fix: set algorithm.kl.renew_steps=null or actor.lora.rank=null"
    )


def adapters_exclude_parameter_offload(config: Config) -> str | None:
    if config.actor.adapters is None or "parameters" not in config.actor.offload:
        return None
    return (
        f"actor.offload={config.actor.offload}: with actor.lora.rank={config.actor.lora.rank} megarl keeps a copy of "
        "the merged weights for the engines, which it cannot offload. Fix: remove parameters from actor.offload"
    )


def adapters_exclude_router_bias_updates(config: Config) -> str | None:
    """Checkpoints contain only the adapters, so no other weights may change."""
    rate = config.actor.megatron_overrides.model.get("moe_router_bias_update_rate", 0)
    if config.actor.adapters is None or not rate:
        return None
    return (
        f"actor.megatron_overrides.model.moe_router_bias_update_rate={rate}: with "
        f"actor.lora.rank={config.actor.lora.rank} checkpoints contain only adapters, not router biases. Fix: remove "
        "the override"
    )


def adapters_exclude_shared_expert_overlap(config: Config) -> str | None:
    overlaps = config.actor.megatron_overrides.model.get("moe_shared_expert_overlap", False)
    if config.actor.adapters is None or not overlaps:
        return None
    return (
        f"actor.megatron_overrides.model.moe_shared_expert_overlap=true: with actor.lora.rank={config.actor.lora.rank} "
        "adapters communicate inside their layers, but the overlap communicates outside of them. Fix: remove the "
        "override"
    )


RULES: tuple[Callable[[Config], str | None], ...] = (
    adapters_exclude_frozen_patterns,
    adapters_exclude_weight_decay_patterns,
    adapters_exclude_new_heads,
    adapters_exclude_fp8,
    adapters_exclude_reference_renewal,
    adapters_exclude_parameter_offload,
    adapters_exclude_router_bias_updates,
    adapters_exclude_shared_expert_overlap,
)
