"""Rules for section `rollout`."""

from __future__ import annotations

from collections.abc import Callable

from megarl.config.schema import Config


def candidate_tokens_are_bounded(config: Config) -> str | None:
    top_p = config.rollout.top_p
    if top_p == 1 or config.rollout.top_k is not None:
        return None
    return (
        f"rollout.top_p={top_p:g}: the trainer needs the candidate tokens of the truncated distribution, but with "
        "rollout.top_k=null each position may have the whole vocabulary as candidates. Fix: set rollout.top_k=100, or "
        "set rollout.top_p=1"
    )


def nodes_do_not_share_memory(config: Config) -> str | None:
    nodes = config.cluster.nodes
    if nodes == 1 or config.is_offline or config.rollout.transport != "shared_memory":
        return None
    return (
        f"rollout.transport=shared_memory: with cluster.nodes={nodes} the trainer and the engines are on different "
        "nodes, which share no memory. Fix: set rollout.transport=auto"
    )


def context_holds_a_prompt_and_a_response(config: Config) -> str | None:
    new, context = config.rollout.max_new_tokens, config.rollout.context_length
    if config.is_offline or new < context:
        return None
    return (
        f"rollout.max_new_tokens={new}: {context} - {new} = {context - new} of rollout.context_length={context} tokens "
        "are left for the prompt. Fix: lower rollout.max_new_tokens, or raise rollout.context_length"
    )


def quantization_requires_bfloat16(config: Config) -> str | None:
    if config.rollout.quantization is None or config.model.dtype == "bfloat16":
        return None
    return (
        f"rollout.quantization={config.rollout.quantization}: fp8 engines compute in bfloat16, but "
        f"model.dtype={config.model.dtype}. Fix: set model.dtype=bfloat16 or rollout.quantization=null"
    )


def weights_are_quantized_once(config: Config) -> str | None:
    rollout = config.rollout
    if rollout.quantization is None or "quantization" not in rollout.vllm_overrides:
        return None
    return (
        f"rollout.vllm_overrides.quantization={rollout.vllm_overrides['quantization']}: with "
        f"rollout.quantization={rollout.quantization} engines already receive quantized weights. Fix: remove the "
        "override, or set rollout.quantization=null"
    )


def sleep_requires_idle_engines(config: Config) -> str | None:
    if not _begins_ahead(config) or not config.rollout.sleep or config.pauses_rollouts:
        return None
    return (
        f"rollout.sleep=true: with {_staleness(config)} and cluster.placement={config.cluster.placement} engines are "
        "never idle, so they cannot sleep. Fix: set rollout.sleep=false"
    )


def sleeping_engines_recompute_kv_cache(config: Config) -> str | None:
    rollout = config.rollout
    if not config.pauses_rollouts or not rollout.sleep or rollout.kv_cache_on_update == "recompute":
        return None
    return (
        f"rollout.kv_cache_on_update={rollout.kv_cache_on_update}: with rollout.sleep=true and "
        f"{_staleness(config)} colocated engines release the KV cache of running requests while models train. Fix: "
        "set rollout.kv_cache_on_update=recompute"
    )


def greedy_baselines_are_not_stale(config: Config) -> str | None:
    if not _begins_ahead(config) or not config.samples_greedily:
        return None
    return (
        f"{_staleness(config)}: algorithm.advantage.estimator={config.algorithm.advantage.estimator} compares each "
        "sample with a greedy response from the same weights, but the weights may change between the two. Fix: set "
        "rollout.max_staleness=0"
    )


def _begins_ahead(config: Config) -> bool:
    return config.rollout.max_staleness > 0 and not config.is_offline


def _staleness(config: Config) -> str:
    return f"rollout.max_staleness={config.rollout.max_staleness}"


RULES: tuple[Callable[[Config], str | None], ...] = (
    candidate_tokens_are_bounded,
    nodes_do_not_share_memory,
    context_holds_a_prompt_and_a_response,
    quantization_requires_bfloat16,
    weights_are_quantized_once,
    sleep_requires_idle_engines,
    sleeping_engines_recompute_kv_cache,
    greedy_baselines_are_not_stale,
)
