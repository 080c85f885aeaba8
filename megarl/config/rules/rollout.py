"""The rules of section `rollout`."""

from __future__ import annotations

from collections.abc import Callable

from megarl.config.schema import Config


def kept_tokens_can_be_handed_over(config: Config) -> str | None:
    top_p = config.rollout.top_p
    if top_p == 1 or config.rollout.top_k is not None:
        return None
    return (
        f"rollout.top_p={top_p:g}: the trainer needs the tokens that the engine kept, to compute log-probs of the same "
        "truncated distribution, and with rollout.top_k=null they may be the whole vocabulary at every position; set "
        "rollout.top_k too, such as 100, or rollout.top_p=1"
    )


def nodes_do_not_share_memory(config: Config) -> str | None:
    nodes = config.cluster.nodes
    if nodes == 1 or config.is_offline or config.rollout.transport != "shared_memory":
        return None
    return (
        f"rollout.transport=shared_memory: with cluster.nodes={nodes} trainer and engines are on several "
        "machines, which share no memory; set rollout.transport=auto"
    )


def context_holds_a_prompt_and_a_response(config: Config) -> str | None:
    new, context = config.rollout.max_new_tokens, config.rollout.context_length
    if config.is_offline or new < context:
        return None
    return (
        f"rollout.max_new_tokens={new}: {context - new} of rollout.context_length={context} tokens are left for the "
        f"prompt ({context} - {new}); lower max_new_tokens or raise context_length"
    )


def quantised_weights_are_bfloat16(config: Config) -> str | None:
    if config.rollout.quantization is None or config.model.dtype == "bfloat16":
        return None
    return (
        f"rollout.quantization={config.rollout.quantization}: engines with fp8 blocks compute in bfloat16, and "
        f"model.dtype={config.model.dtype}; set model.dtype=bfloat16 or rollout.quantization=null"
    )


def weights_are_quantised_once(config: Config) -> str | None:
    rollout = config.rollout
    if rollout.quantization is None or "quantization" not in rollout.vllm_overrides:
        return None
    return (
        f"rollout.vllm_overrides.quantization={rollout.vllm_overrides['quantization']}: with rollout.quantization="
        f"{rollout.quantization} weights come quantised; leave one of them out"
    )


def engines_stay_awake_for_rollouts_ahead(config: Config) -> str | None:
    if not _begins_ahead(config) or not config.rollout.sleep or config.pauses_rollouts:
        return None
    return (
        f"rollout.sleep=true: with {_staleness(config)} and cluster.placement={config.cluster.placement} engines "
        "always have something to do; set rollout.sleep=false"
    )


def keys_and_values_outlive_a_pause(config: Config) -> str | None:
    rollout = config.rollout
    if not config.pauses_rollouts or not rollout.sleep or rollout.kv_cache_on_update == "recompute":
        return None
    return (
        f"rollout.kv_cache_on_update={rollout.kv_cache_on_update}: with rollout.sleep=true and {_staleness(config)} engines that "
        "share devices give the memory of keys and values back while models train, and what is under way loses them; "
        "set rollout.kv_cache_on_update=recompute"
    )


def rollouts_ahead_are_compared_with_their_like(config: Config) -> str | None:
    if not _begins_ahead(config) or not config.samples_greedily:
        return None
    return (
        f"{_staleness(config)}: algorithm.advantage.estimator={config.algorithm.advantage.estimator} compares samples "
        "with a greedy response of the same weights, and new ones may come between them; set rollout.max_staleness=0"
    )


def rollouts_ahead_are_sampled(config: Config) -> str | None:
    if config.rollout.max_staleness == 0 or not config.is_offline:
        return None
    return (
        f"{_staleness(config)}: with data.format={config.data.format} nothing is sampled; set rollout.max_staleness=0"
    )


def something_can_be_too_old(config: Config) -> str | None:
    if config.rollout.on_stale == "wait" or (config.prompts_ahead and not config.is_offline):
        return None
    if config.is_offline:
        return f"rollout.on_stale=drop: with data.format={config.data.format} nothing is sampled; set rollout.on_stale=wait"
    return (
        "rollout.on_stale=drop: no prompt is begun ahead; set rollout.on_stale=wait, or rollout.max_staleness=1 or "
        "batch.oversampling=1.25"
    )


def dropped_rollouts_can_be_ended(config: Config) -> str | None:
    if not config.drops_rollouts or not config.has_environment:
        return None
    return (
        "rollout.on_stale=drop: it ends rollouts in the middle, and those of "
        f"environment.class={config.environment.name} are not ended before their environment does; set "
        "rollout.on_stale=wait"
    )


def _begins_ahead(config: Config) -> bool:
    return config.rollout.max_staleness > 0 and not config.is_offline


def _staleness(config: Config) -> str:
    return f"rollout.max_staleness={config.rollout.max_staleness}"


RULES: tuple[Callable[[Config], str | None], ...] = (
    kept_tokens_can_be_handed_over,
    nodes_do_not_share_memory,
    context_holds_a_prompt_and_a_response,
    quantised_weights_are_bfloat16,
    weights_are_quantised_once,
    engines_stay_awake_for_rollouts_ahead,
    keys_and_values_outlive_a_pause,
    rollouts_ahead_are_compared_with_their_like,
    rollouts_ahead_are_sampled,
    something_can_be_too_old,
    dropped_rollouts_can_be_ended,
)
