"""Rules for the sections `actor.lora`, `actor.experts` and `actor.mtp`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from megarl.config.document import show
from megarl.config.schema import Config


def adapters_exclude_patterns(config: Config) -> Iterator[str]:
    rank, frozen, patterns = config.actor.lora.rank, config.actor.frozen, config.actor.optimizer.no_weight_decay
    if rank is not None and frozen:
        yield (
            f"actor.frozen={frozen}: actor.lora.rank={rank} already freezes the whole model and trains only its "
            "adapters. Fix: set actor.frozen=[] or actor.lora.rank=null"
        )
    if rank is not None and patterns:
        yield (
            f"actor.optimizer.no_weight_decay={patterns}: the patterns select tensors of the model, but "
            f"actor.lora.rank={rank} freezes all of them. Fix: set actor.optimizer.no_weight_decay=[]"
        )


def adapters_exclude_muon(config: Config) -> Iterator[str]:
    name, rank = config.actor.optimizer.name, config.actor.lora.rank
    if rank is not None and name == "muon":
        yield (
            f"actor.optimizer.name={name}: with actor.lora.rank={rank}, only adapters are trained, and Muon does not "
            "support them. Fix: set actor.optimizer.name=adamw or actor.lora.rank=null"
        )


def adapters_exclude_new_heads(config: Config) -> Iterator[str]:
    """A new score or value head has no adapter, so it would not be trained."""
    rank = config.actor.lora.rank
    if rank is not None and config.trains_reward_model:
        yield (
            f"actor.lora.rank={rank}: with algorithm.objective.name={config.algorithm.objective.name} the actor has a "
            "new score head, which would not be trained. Fix: set actor.lora.rank=null"
        )
    elif rank is not None and config.actor_has_values:
        yield (
            f"actor.lora.rank={rank}: with critic.shared_backbone=true the actor has a new value head, which would "
            "not be trained. Fix: set critic.shared_backbone=false or actor.lora.rank=null"
        )


def adapters_exclude_training_mtp(config: Config) -> Iterator[str]:
    coefficient, rank = config.actor.mtp.loss_coefficient, config.actor.lora.rank
    if config.actor.adapters is not None and config.actor.mtp.is_trained:
        yield (
            f"actor.mtp.loss_coefficient={coefficient}: with actor.lora.rank={rank} only adapters are trained and "
            "checkpointed, but the MTP layer has none. Fix: set actor.mtp.loss_coefficient=0.0, which keeps the "
            "layer, or actor.lora.rank=null"
        )


def objective_allows_training_mtp(config: Config) -> Iterator[str]:
    objective, coefficient = config.algorithm.objective, config.actor.mtp.loss_coefficient
    if not config.actor.mtp.is_trained:
        return
    if objective.spec.is_pairwise or config.trains_reward_model:
        yield (
            f"actor.mtp.loss_coefficient={coefficient}: algorithm.objective.name={objective.name} has no per-token "
            "weights, which the MTP loss requires. Fix: set actor.mtp.loss_coefficient=0.0"
        )
    elif config.algorithm.trust_region.kl_limit is not None:
        yield (
            f"actor.mtp.loss_coefficient={coefficient}: the step of TRPO (algorithm.trust_region.kl_limit) trains the "
            "policy only. Fix: set actor.mtp.loss_coefficient=0.0"
        )


def adapters_exclude_fp8(config: Config) -> Iterator[str]:
    if config.actor.adapters is not None and config.actor.fp8 is not None:
        yield (
            f"actor.fp8={config.actor.fp8}: with actor.lora.rank={config.actor.lora.rank} engines compute with merged "
            "weights, but the trainer would quantize the model and the adapters separately. Fix: set actor.fp8=null or "
            "actor.lora.rank=null"
        )


def adapters_exclude_reference_renewal(config: Config) -> Iterator[str]:
    renew = config.algorithm.kl.renew_steps
    if config.actor.adapters is not None and renew is not None:
        yield (
            f"algorithm.kl.renew_steps={renew}: with actor.lora.rank={config.actor.lora.rank} the reference is the "
            "model without adapters, which never changes. Fix: set algorithm.kl.renew_steps=null or "
            "actor.lora.rank=null"
        )


def adapters_exclude_parameter_offload(config: Config) -> Iterator[str]:
    if config.actor.adapters is not None and "parameters" in config.actor.offload:
        yield (
            f"actor.offload={config.actor.offload}: with actor.lora.rank={config.actor.lora.rank} megarl keeps a copy "
            "of the merged weights for the engines, which it cannot offload. Fix: remove parameters from actor.offload"
        )


def adapters_exclude_model_overrides(config: Config) -> Iterator[str]:
    rank, overrides = config.actor.lora.rank, config.actor.megatron_overrides.model
    if rank is not None and (rate := overrides.get("moe_router_bias_update_rate", 0)):
        yield (
            f"actor.megatron_overrides.model.moe_router_bias_update_rate={rate}: with actor.lora.rank={rank}, "
            "checkpoints contain only adapters, so the updated router biases would be lost. Fix: remove the override"
        )
    if rank is not None and overrides.get("moe_shared_expert_overlap", False):
        yield (
            f"actor.megatron_overrides.model.moe_shared_expert_overlap=true: with actor.lora.rank={rank} adapters "
            "communicate inside their layers, but the overlap communicates outside of them. Fix: remove the override"
        )


def router_overrides_allow_route_replay(config: Config) -> Iterator[str]:
    extra = config.actor.megatron_overrides.model
    for name in extra if config.actor.experts.replay_routes else ():
        if name == "moe_router_fusion" and extra[name]:
            why = "the fused router selects and weights experts in one kernel"
        elif name == "moe_router_load_balancing_type" and extra[name] == "sinkhorn":
            why = "sinkhorn balancing selects its own experts"
        elif "cuda_graph" in name and extra[name] not in (False, None, "none"):
            why = "a CUDA graph replays the routes of the first microbatch"
        else:
            continue
        yield (
            f"actor.megatron_overrides.model.{name}={show(extra[name])}: {why}, which conflicts with "
            "actor.experts.replay_routes=true. Fix: remove the override, or set actor.experts.replay_routes=false"
        )


_V1 = "selects vLLM's Model Runner V1, but only V2 returns routes"
_CACHE = "vLLM returns routes only with the prefix cache on GPUs, and only without it on CPU"

WITHOUT_ROUTES: dict[str, tuple[Any, str]] = {
    "enable_prefix_caching": (None, _CACHE),
    "aux_output_config": (None, "megarl requests the routes itself"),
    "enable_dbo": (False, _V1),
    "ubatch_size": (0, _V1),
    "decode_context_parallel_size": (1, "an engine with context parallelism does not return routes"),
    "kv_transfer_config": (None, "an engine does not return routes of a transferred KV cache"),
}
"""Arguments in rollout.vllm_overrides -> the only value that lets vLLM return routes, and the reason. vLLM checks the
same conditions in VllmConfig._verify_aux_output_compatibility. megarl rejects pipeline-parallel engines in all runs."""


def engine_overrides_allow_route_replay(config: Config) -> Iterator[str]:
    extra = config.rollout.vllm_overrides
    for name in extra if config.actor.experts.replay_routes else ():
        if name in WITHOUT_ROUTES and extra[name] != WITHOUT_ROUTES[name][0]:
            yield (
                f"rollout.vllm_overrides.{name}={show(extra[name])}: {WITHOUT_ROUTES[name][1]}, which conflicts with "
                "actor.experts.replay_routes=true. Fix: remove the override, or set actor.experts.replay_routes=false"
            )


RULES = (
    adapters_exclude_patterns,
    adapters_exclude_muon,
    adapters_exclude_new_heads,
    adapters_exclude_training_mtp,
    objective_allows_training_mtp,
    adapters_exclude_fp8,
    adapters_exclude_reference_renewal,
    adapters_exclude_parameter_offload,
    adapters_exclude_model_overrides,
    router_overrides_allow_route_replay,
    engine_overrides_allow_route_replay,
)
