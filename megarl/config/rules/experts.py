"""Rules for section `actor.experts`."""

from __future__ import annotations

from collections.abc import Callable

from megarl.config.document import show
from megarl.config.schema import Config

REPLAYED = "actor.experts.replay_routes=true"

CACHE = "rollout.vllm_overrides.enable_prefix_caching"


def router_overrides_allow_route_replay(config: Config) -> str | None:
    extra, lines = config.actor.megatron_overrides.model, []
    for name in extra if config.actor.experts.replay_routes else ():
        if name == "moe_router_fusion" and extra[name]:
            why = "the fused router selects and weights experts in one kernel"
        elif name == "moe_router_load_balancing_type" and extra[name] == "sinkhorn":
            why = "sinkhorn balancing selects its own experts"
        elif "cuda_graph" in name and extra[name] not in (False, None, "none"):
            why = "a CUDA graph replays the routes of the first microbatch"
        else:
            continue
        lines.append(
            f"actor.megatron_overrides.model.{name}={show(extra[name])}: {why}, which conflicts with {REPLAYED}. Fix: "
            "remove the override, or set actor.experts.replay_routes=false"
        )
    return "\n".join(lines) or None


def prefix_caching_allows_route_replay(config: Config) -> str | None:
    extra = config.rollout.vllm_overrides
    if not config.actor.experts.replay_routes or "enable_prefix_caching" not in extra:
        return None
    return (
        f"{CACHE}={show(extra['enable_prefix_caching'])}: megarl sets this argument when {REPLAYED}, because vLLM can "
        "return routes for cached prefixes on GPUs but not on CPU. Fix: remove the override"
    )


RULES: tuple[Callable[[Config], str | None], ...] = (
    router_overrides_allow_route_replay,
    prefix_caching_allows_route_replay,
)
