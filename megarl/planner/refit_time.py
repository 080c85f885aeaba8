"""Lower bound on the time of a refit, in closed form. `megarl reshard` makes the plan itself and simulates it."""

from __future__ import annotations

from dataclasses import dataclass

from megarl.cluster.memory.parameters import ModelParameters
from megarl.config.device_spans import num_devices
from megarl.config.model_schema import Layout
from megarl.config.schema import Config
from megarl.planner.hardware import LINK_SHARE, Cluster
from megarl.resharding.planning.schedule import Bandwidth


@dataclass(frozen=True, slots=True)
class RefitTime:
    """Time and bytes of a refit.

    Attributes:
        parts: seconds of each potential bottleneck; all of them overlap.
        entering: bytes that each node with engines receives.
    """

    parts: dict[str, float]
    entering: float

    @property
    def seconds(self) -> float:
        return max(self.parts.values())


def refit_time(config: Config, model: ModelParameters, cluster: Cluster) -> RefitTime:
    """Return the minimum time to bring the actor's weights into every engine, over links at LINK_SHARE of their nominal
    bandwidth."""
    return least_refit(
        config.actor.layout,
        (config.rollout.tp, config.rollout.replicas),
        model,
        model.engine_bytes(config),
        cluster.gpus_per_node,
        _speeds(config, cluster),
        config.is_colocated,
    )


def _speeds(config: Config, cluster: Cluster) -> Bandwidth:
    """Return the bandwidths of the links. If trainer and engines are on one node, NVLink connects them."""
    network, nvlink = (1e9 * LINK_SHARE * speed for speed in (cluster.gpu.network_gb_s, cluster.gpu.nvlink_gb_s))
    return Bandwidth(inter=nvlink if num_devices(config) <= cluster.gpus_per_node else network, intra=nvlink)


def least_refit(
    layout: Layout,
    engines: tuple[int, int],
    model: ModelParameters,
    rank_bytes: int,
    gpus_per_node: int,
    speeds: Bandwidth,
    colocated: bool,
) -> RefitTime:
    """Return the minimum time of a refit.

    The bytes that a node's engines need enter it once, over the network cards of all its GPUs, and are forwarded inside
    the node. Colocated engines receive nothing that their node's trainer ranks already hold. The load is spread evenly
    over the sources.

    Args:
        engines: tp of an engine, and the number of engines.
        rank_bytes: bytes of each engine rank's weights.
    """
    tp, replicas = engines
    workers = tp * replicas
    on_node = min(workers, gpus_per_node)
    nodes = -(-workers // gpus_per_node)
    needed = rank_bytes * min(tp, on_node)
    local_share = _share_on_node(layout, model, gpus_per_node) if colocated else 0.0
    entering = needed * (1 - local_share)
    if colocated and nodes == 1:
        entering = 0.0
    sources = layout.world_size
    return RefitTime(
        parts={
            "bytes into a node": entering / on_node / speeds.inter,
            "bytes out of the trainer": entering * nodes / sources / speeds.inter,
            "bytes inside a node": rank_bytes / speeds.intra,
        },
        entering=entering,
    )


def _share_on_node(layout: Layout, model: ModelParameters, gpus_per_node: int) -> float:
    """Return the share of the weights that the trainer ranks of one node hold in total."""
    stage_ranks = layout.tp * layout.cp * layout.dp
    stages = max(1, gpus_per_node // stage_ranks)
    within = min(gpus_per_node, stage_ranks)
    count = 0.0
    for stage in range(min(stages, layout.pp)):
        held = model.of_stage(layout, stage)
        count += (held.count - held.experts) * min(layout.tp, within)
        count += held.experts * min(layout.ep * layout.expert_tp, within)
    return min(1.0, count / model.count)
