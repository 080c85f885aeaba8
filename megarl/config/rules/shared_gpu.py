"""Rules for engines and models that share GPUs."""

from __future__ import annotations

from collections.abc import Callable

from megarl.config.device_spans import NAMES, device_spans
from megarl.config.divisors import divisors
from megarl.config.model_schema import Layout
from megarl.config.schema import Config


def engines_fill_the_shared_gpus(config: Config) -> str | None:
    rollout, ranks = config.rollout, config.actor.layout.world_size
    workers = rollout.replicas * rollout.tp
    if not _shares_gpus(config) or workers == ranks:
        return None
    replicas, rest = divmod(ranks, rollout.tp)
    remedy = f"rollout.tp to one of {', '.join(map(str, divisors(ranks)))}" if rest else f"rollout.replicas={replicas}"
    return (
        f"rollout.replicas={rollout.replicas}: with cluster.placement=colocated each GPU has one actor rank and one "
        f"engine rank, but actor.layout has {ranks} ranks and the engines have {rollout.replicas} x "
        f"rollout.tp={rollout.tp} = {workers}. Fix: set {remedy}, or cluster.placement=disaggregated"
    )


def sharing_engines_sleep(config: Config) -> str | None:
    if not _shares_gpus(config) or config.rollout.sleep:
        return None
    return (
        f"rollout.sleep=false: colocated engines would keep their weights and {config.rollout.kv_cache_gib:g} GiB of "
        "KV cache in memory while models train on the same GPUs. Fix: set rollout.sleep=true or "
        "cluster.placement=disaggregated"
    )


def sharing_engines_do_not_receive_over_nccl(config: Config) -> str | None:
    if not _shares_gpus(config) or not config.sends_weights:
        return None
    return (
        f"rollout.transport={config.rollout.transport}: NCCL cannot send from a GPU to itself, but with "
        "cluster.placement=colocated the trainer and the engines share GPUs. Fix: set rollout.transport=auto"
    )


def weights_travel(config: Config, devices_per_node: int) -> bool:
    """Return whether a refit transfers data: all weights, or only those that an engine cannot read on its own node."""
    first = device_spans(config)[NAMES["actor"]].start
    return config.sends_weights or not stays_in_nodes(config.actor.layout, devices_per_node, first)


def stays_in_nodes(layout: Layout, devices_per_node: int, first: int) -> bool:
    """Return whether the ranks of each node together hold all parameters. The ranks of a pipeline stage are
    consecutive; within a stage, so are the tensor-parallel ranks and the ep x etp ranks that split the experts. `first`
    is the first rank's device."""
    if first // devices_per_node == (first + layout.world_size - 1) // devices_per_node:
        return True
    experts = layout.ep * layout.expert_tp if layout.ep > 1 else 1
    begins, sizes = (first, devices_per_node), (layout.tp, experts)
    return layout.pp == 1 and all(begin % size == 0 for begin in begins for size in sizes)


def _shares_gpus(config: Config) -> bool:
    return config.is_colocated and not config.is_offline


RULES: tuple[Callable[[Config], str | None], ...] = (
    engines_fill_the_shared_gpus,
    sharing_engines_sleep,
    sharing_engines_do_not_receive_over_nccl,
)
