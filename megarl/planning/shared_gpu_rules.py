"""The rules of engines and models that share GPUs, wherever these are."""

from __future__ import annotations

from collections.abc import Callable

from megarl.config.divisors import divisors
from megarl.config.schema import Config


def engines_fill_the_shared_gpus(config: Config) -> str | None:
    rollout, ranks = config.rollout, config.actor.layout.world_size
    workers = rollout.replicas * rollout.tp
    if not _shares_gpus(config) or workers == ranks:
        return None
    replicas, rest = divmod(ranks, rollout.tp)
    remedy = f"rollout.tp to one of {', '.join(map(str, divisors(ranks)))}" if rest else f"rollout.replicas={replicas}"
    return (
        f"rollout.replicas={rollout.replicas}: colocated, each GPU has a rank of the actor and one of an engine, and "
        f"actor.layout has {ranks} ranks, but {rollout.replicas} x rollout.tp={rollout.tp} = {workers}; set {remedy}, "
        "or cluster.placement=disaggregated"
    )


def sharing_engines_sleep(config: Config) -> str | None:
    if not _shares_gpus(config) or config.rollout.sleep:
        return None
    return (
        "rollout.sleep=false: colocated, engines would keep the memory of their weights and of "
        f"rollout.kv_cache_gib={config.rollout.kv_cache_gib:g} while the models are trained on the same GPUs; set "
        "rollout.sleep=true or cluster.placement=disaggregated"
    )


def sharing_ranks_do_not_send(config: Config) -> str | None:
    if not _shares_gpus(config) or not config.sends_weights:
        return None
    if config.cluster.nodes > 1:
        return (
            f"cluster.nodes={config.cluster.nodes}: weights are sent between nodes, but NCCL does not send from a GPU "
            "to itself, and with cluster.placement=colocated trainer and engine are on the same; set "
            "cluster.placement=disaggregated"
        )
    return (
        f"rollout.transport={config.rollout.transport}: NCCL does not send from a GPU to itself, and with "
        "cluster.placement=colocated trainer and engine are on the same; set rollout.transport=auto"
    )


def _shares_gpus(config: Config) -> bool:
    return config.is_colocated and not config.is_offline


RULES: tuple[Callable[[Config], str | None], ...] = (
    engines_fill_the_shared_gpus,
    sharing_engines_sleep,
    sharing_ranks_do_not_send,
)
