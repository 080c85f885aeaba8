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


def deltas_are_sent(config: Config) -> str | None:
    rollout = config.rollout
    if not rollout.refit_delta or config.sends_weights:
        return None
    return (
        f"rollout.refit_delta=true: with rollout.transport={rollout.transport} and "
        f"cluster.placement={config.cluster.placement} engines read the weights where they lie, and no more is sent "
        "than what other nodes have; set rollout.transport=p2p or rollout.refit_delta=false"
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


RULES: tuple[Callable[[Config], str | None], ...] = (
    kept_tokens_can_be_handed_over,
    deltas_are_sent,
    nodes_do_not_share_memory,
    context_holds_a_prompt_and_a_response,
)
